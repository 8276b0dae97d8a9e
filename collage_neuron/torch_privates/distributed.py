"""Private names of FSDP, DTensor and ZeRO, whose parameters are spread over processes, and of DistributedDataParallel.

A DistributedDataParallel gets a new reducer as its `__setstate__` makes one, and in no public way.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

FSDP1 = "torch.distributed.fsdp._flat_param", "FlatParamHandle"
"""Module and class of what FSDP1 keeps of its flat parameters: no public list has them."""


def is_flattened(p: torch.Tensor) -> bool:
    """Returns True for a parameter of FSDP1, with `use_orig_params` or without."""
    return bool(getattr(p, "_fsdp_flattened", False))


def of_flat_parameter(handle: Any) -> set[torch.Tensor]:
    """A flat parameter of FSDP1 and the parameters that are views of it."""
    return {handle.flat_param, *(handle.flat_param._params or ())}


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Returns True for a module given to `fully_shard` (FSDP2), without an import of torch.distributed."""
    return hasattr(module, "_get_fsdp_state")


def is_managed_by_fsdp(module: torch.nn.Module) -> bool:
    """Returns True for a module whose parameters FSDP1 or FSDP2 holds: both mark it for torch.compile."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def has_laid_out(module: torch.nn.Module) -> bool:
    """Returns True if FSDP2 has laid out its buffers: the first forward does, and sets `_is_root`."""
    state = getattr(module, "_get_fsdp_state", None)
    return state is not None and getattr(state(), "_is_root", None) is not None


def offset_of_shard(p: Any) -> Sequence[int]:
    """Where in a DTensor the part of this process begins, as torch.distributed.checkpoint asks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offset


def part(t: Any) -> Any:
    """What is in a DTensor, or `t` itself; the newest `to_local()` makes a view of it."""
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter)  # most are: a tensor takes .5 us to say what it has not
    return t if is_plain or not hasattr(t, "to_local") else t._local_tensor


def parts(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """`part` of each; if all are DTensors, as those of FSDP2 are, without a frame for each."""
    try:
        return list(map(attrgetter("_local_tensor"), tensors))
    except AttributeError:
        return list(map(part, tensors))


def layouts(tensors: Sequence[Any]) -> list[Any]:
    """What equals that of a DTensor that is sharded alike: mostly the same object. None for other tensors."""
    try:
        return list(map(attrgetter("_spec"), tensors))
    except AttributeError:
        return [getattr(t, "_spec", None) for t in tensors]


def sharded_like(part: torch.Tensor, t: Any) -> Any:
    """A DTensor that is sharded like the DTensor `t`, around a part of any dtype that may have no memory.

    `DTensor.from_local` calls an operation on the part.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = TensorMeta(t.shape, t.stride(), part.dtype)
    make: Any = DTensor
    return make(part, DTensorSpec(t.device_mesh, t.placements, tensor_meta=whole), requires_grad=False)


def all_reduce() -> Any:
    """The operation by which DTensor adds up parts; None where torch has no processes."""
    return torch.ops._c10d_functional.all_reduce.default if torch.distributed.is_available() else None


def is_wrapping(func: Any) -> bool:
    """Returns True for the operation by which torch 2.13 wraps such a result, which then waits when it is used."""
    return str(func) == "_c10d_functional._wrap_tensor_autograd.default"


def wait_tensor() -> Any:
    """The operation that waits for the result of another process; None where torch has none."""
    return torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None


def process_group(name: str) -> Any:
    """The group of processes of a name, which is all that those operations say of it."""
    named: Any = torch.distributed.distributed_c10d
    return named._resolve_process_group(name)


def device_of_zero(zero: Any) -> torch.device:
    """The device on which torch's ZeroRedundancyOptimizer talks to other processes."""
    device: torch.device = zero._default_device
    return device


_DDP = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")


def has_step_in_backward(p: torch.Tensor) -> bool:
    """Returns True for a parameter that `_apply_optimizer_in_backward` steps: nothing else says so."""
    return hasattr(p, "_in_backward_optimizers")


def ddp_problems(ddp: Any) -> list[str]:
    """Why a DistributedDataParallel cannot be set up anew: more than its reducer depends on the dtype."""
    problems = {
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "a reducer in Python (torch._dynamo.config.optimize_ddp)": ddp._use_python_reducer,
        "optimizers that step in backward": any(map(has_step_in_backward, ddp.parameters())),
        "a communication hook that has run": bool(ddp._comm_hooks) and ddp._lazy_init_ran,
        "a communication hook of torch's own": not ddp._comm_hooks
        and bool(ddp._get_ddp_logging_data().get("comm_hook")),
        f"a reducer that torch {torch.__version__} makes in a new way": not all(hasattr(ddp, n) for n in _DDP),
    }
    return [problem for problem, there in problems.items() if there]


def set_up_anew(ddp: Any) -> None:
    """Gives a DistributedDataParallel a reducer for its parameters as they are now, as unpickling it does.

    Every process has to do so between the same two steps: the order of buckets is agreed on in the next ones.
    """
    ddp._remove_autograd_hooks()  # of parameters that were bf16 before, and keep their nodes
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    # Buckets follow the order in which gradients come, which a new reducer has to learn.
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False  # the first backward learns the order of gradients
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    distributed: Any = torch.distributed
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        distributed._register_comm_hook(ddp.reducer, state, hook)
