"""Every use of private names of torch and torch_xla in this project, by subject; no other file uses any.

Each entry says why no public name is enough. `tests/repository/test_torch_privates.py` has the test that fails when
torch changes what it uses, and checks that no other file reaches into torch.
"""

from collage_neuron.torch_privates.distributed import (
    FSDP1,
    all_reduce,
    ddp_problems,
    device_of_zero,
    has_laid_out,
    has_step_in_backward,
    is_flattened,
    is_fully_sharded,
    is_managed_by_fsdp,
    is_wrapping,
    of_flat_parameter,
    offset_of_shard,
    part,
    process_group,
    set_up_anew,
    sharded_like,
    wait_tensor,
)
from collage_neuron.torch_privates.modules import (
    NORMS,
    Surroundings,
    compile_errors,
    drop_load_hook,
    each_tensor,
    guarding,
    has_load_hook,
    has_pre_hook,
    not_compiled,
)
from collage_neuron.torch_privates.operations import (
    DispatchMode,
    dispatch_modes,
    function_modes,
    is_autocast_enabled,
    is_operation,
    modes,
    on_lists,
    schema,
    unseen,
    without_modes,
)
from collage_neuron.torch_privates.optimizers import (
    count_step,
    has_hooks,
    hooked_steps,
    is_counted_by_scheduler,
    is_of_torch,
    let_have_hooks,
    mark_counted,
    mark_hooked,
    put_last,
    step_pre_hooks,
    unhooked_step,
    unscales_itself,
)
from collage_neuron.torch_privates.tensors import (
    are_held_once,
    attributes,
    base_of,
    copy_each,
    copy_to_all,
    exchange,
    exchange_all,
    exchange_each,
    exchange_shards,
    flattened,
    guard,
    holders,
    inside,
    references,
    storage_id,
    users,
    version,
    without_memory,
)
from collage_neuron.torch_privates.xla import (
    groups_of_xla_zero,
    is_of_xla_fsdp,
    is_split_over_devices,
    mark_sharding_like,
    user_computation,
    xla_address,
    xla_dot,
)

__all__ = [
    "FSDP1", "NORMS", "DispatchMode", "Surroundings", "all_reduce", "are_held_once", "attributes", "base_of",
    "compile_errors", "copy_each", "copy_to_all", "count_step", "ddp_problems", "device_of_zero",
    "dispatch_modes", "drop_load_hook", "each_tensor", "exchange", "exchange_all", "exchange_each",
    "exchange_shards", "flattened", "function_modes", "groups_of_xla_zero", "guard", "guarding", "has_hooks",
    "has_laid_out", "has_load_hook", "has_pre_hook", "has_step_in_backward", "holders", "hooked_steps",
    "inside", "is_autocast_enabled", "is_counted_by_scheduler", "is_flattened", "is_fully_sharded",
    "is_managed_by_fsdp", "is_of_torch", "is_of_xla_fsdp", "is_operation", "is_split_over_devices",
    "is_wrapping", "let_have_hooks", "mark_counted", "mark_hooked", "mark_sharding_like", "modes",
    "not_compiled", "of_flat_parameter", "offset_of_shard", "on_lists", "part", "process_group", "put_last",
    "references", "schema", "set_up_anew", "sharded_like", "step_pre_hooks", "storage_id", "unhooked_step",
    "unscales_itself", "unseen", "user_computation", "users", "version", "wait_tensor", "without_memory",
    "without_modes", "xla_address", "xla_dot",
]  # fmt: skip
