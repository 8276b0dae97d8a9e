"""Every use of private names of torch and torch_xla in this project; no other file uses any.

Each entry says why no public name is enough, and names the test that fails when torch changes what it uses
(`tests/repository/test_torch_privates.py` checks that these tests exist, and that no other file reaches into torch).
`noqa: E501` stands where the name of such a test is too long for a line: it must stay in one piece to be found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = ["DispatchMode"]
"""Sees every operation below autograd: `torch.overrides` has only the mode above it, which sees composite operations.

Noticed by `tests/passes/test_capture.py::test_the_captured_graph_replays_the_optimizer`.
"""

# ---- tensors


version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]  # a stub: int
"""How often a tensor, or one that shares its memory, was written in place: it costs no look at the values.

Noticed by `tests/checkpoint/test_loading_low_words.py::test_a_clamp_between_steps_leaves_the_low_words_of_what_it_did_not_change`.
"""  # noqa: E501  # names of tests stay in one piece


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The identity of a tensor's memory, its `untyped_storage()`. `data_ptr()` is 0 on the meta device, of recordings.

Noticed by `tests/passes/test_capture.py::test_the_captured_graph_replays_the_optimizer`.
"""


def copy_to_all(tensors: list[torch.Tensor], value: torch.Tensor) -> None:
    """Copies one value to many tensors: a public call for each (`copy_`) costs ten times as much.

    Noticed by `tests/runtime/test_steady.py::test_counts_are_written_where_they_are`.
    """
    torch._foreach_copy_(tensors, [value] * len(tensors))


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: True if all have the same classes, dtypes, devices, shapes, strides and flags.

    It is the guard of torch.compile, one call for all: reading each property of a thousand tensors costs six times as
    much. It returns False whenever a tensor occurs twice: then, and where torch has none, the properties are read.
    Noticed by `tests/runtime/test_steady.py::test_a_guard_notices_what_may_change_about_a_tensor`.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):
            check: Callable[..., bool] = guards.check
            return check
    except (AttributeError, TypeError, RuntimeError):
        pass
    expected = list(map(_properties, tensors))
    return lambda *others: list(map(_properties, others)) == expected


def _properties(t: torch.Tensor) -> tuple[Any, ...]:
    flags = t.requires_grad, t.is_inference(), t.is_neg(), t.is_conj()
    return type(t), t.dtype, t.device, t.layout, t.shape, t.layout is torch.strided and t.stride(), flags


def viewed(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `t` is a view of.

    Noticed by `tests/hostile/test_edges.py::test_views_of_a_flat_buffer`.
    """
    return t._base


def made_of_class(kind: type[torch.Tensor], data: torch.Tensor) -> Any:
    """A tensor of a subclass, without its constructor, which may ask for anything.

    Noticed by `tests/hostile/test_identity.py::test_a_twin_of_the_true_class_has_the_attributes`.
    """
    unsafe: Any = torch.Tensor
    return unsafe._make_subclass(kind, data, True)


# ---- operations


def schema(operation: Any) -> Any:
    """What an operation takes, returns and writes: `torch.library` lets one declare a schema, and not read it.

    Noticed by `tests/passes/test_capture.py::test_the_captured_graph_replays_the_optimizer`.
    """
    return operation._schema


def is_operation(target: object) -> bool:
    """Returns True for one overload of an operation, and not for a function; their class has no public name.

    Noticed by `tests/passes/test_verify.py::test_explain_shows_formats_bytes_and_both_graphs`.
    """
    return isinstance(target, torch._ops.OpOverload)


def not_compiled(function: Callable[..., Any]) -> Any:
    """Keeps a compiler around the training loop out of a function, as torch.optim does.

    `torch.compiler.disable` imports the compiler, seconds that `import collage_neuron` would take longer.
    Noticed by `tests/repository/test_trainers.py::test_torch_compile_around_the_step_leaves_the_update_alone`.
    """
    return _disable_dynamo(function)


def guarding(graphs: int) -> Any:
    """A context in which torch.compile looks at all of a model before it runs a captured graph again.

    And keeps so many graphs, where 8 are its default, before it gives up.

    To save time it takes for granted that hooks of modules stay as they are, and each parameter's dtype, shape and
    `requires_grad`, and which of them are tied: a layer that is thawed would never get a gradient.
    Noticed by `tests/matmuls/test_surroundings.py::test_what_changes_about_a_model_is_noticed`.
    """
    return torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=False,
        skip_tensor_guards_with_matching_dict_tags=False,
        skip_no_tensor_aliasing_guards_on_parameters=False,
        recompile_limit=graphs,
    )


class Surroundings:
    """What torch.compile takes for granted of a model: hooks of all modules, and the forward of each class.

    Noticed by `tests/matmuls/test_changes.py`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._hooks = _global_hooks()
        self._forwards = {type(m): type(m).forward for m in model.modules()}

    def changed(self) -> bool:
        """Returns True if something of it is not what it was."""
        return _global_hooks() != self._hooks or any(c.forward is not f for c, f in self._forwards.items())


def _global_hooks() -> list[tuple[Any, ...]]:
    m = torch.nn.modules.module
    kinds = m._global_forward_pre_hooks, m._global_forward_hooks, m._global_backward_pre_hooks, m._global_backward_hooks
    return [tuple(kind.items()) for kind in kinds]


def compile_errors() -> tuple[type[Exception], ...]:
    """What torch.compile raises of a function that it cannot capture, or for whose result our backend raised.

    Noticed by `tests/matmuls/test_surroundings.py::test_what_cannot_be_captured_is_rejected_with_the_reason`.
    """
    return torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit


# ---- optimizers and schedulers


def unhooked_step(base: type[Optimizer]) -> Any:
    """`base.step` without the wrapper in which torch runs an optimizer's hooks: a recording must not run them.

    Noticed by `tests/passes/test_host_state.py::test_what_only_records_leaves_no_trace`.
    """
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def mark_hooked(step: Any) -> None:
    """Says that `step` runs hooks already: an object that changes its class is not wrapped by `Optimizer.__init__`.

    Noticed by `tests/conversion/test_compile_model.py::test_the_first_step_runs_hooks_around_it_and_the_closure_once`.
    """
    step.hooked = True


def put_last(optimizer: Optimizer, hook: Any) -> None:
    """Runs `hook` before steps, after all other hooks of the optimizer: no public way moves one that is there.

    Noticed by
    `tests/conversion/test_compile_classes.py::test_a_hook_added_after_compiling_runs_before_a_step_that_bypasses`.
    """
    hooks: Any = optimizer._optimizer_step_pre_hooks  # an ordered dictionary by the ids of handles
    ours = next((key for key, other in hooks.items() if other is hook), None)
    if ours is None:
        Optimizer.register_step_pre_hook(optimizer, hook)
    else:
        hooks.move_to_end(ours)


def is_of_torch(name: str) -> bool:
    """Returns True for an attribute that `Optimizer` keeps hooks and profiling in.

    Noticed by `tests/runtime/test_methods.py::test_numbers_groups_and_attributes_are_those_of_the_plain_optimizer`.
    """
    return name.startswith(("_optimizer_", "_hook_for_profile"))


def is_counted_by_scheduler(step: Any) -> bool:
    """Returns True for an `optimizer.step` that a learning rate scheduler has put in the place of the class's.

    Noticed by `tests/conversion/test_compile_model.py::test_a_scheduler_attached_before_the_first_step_keeps_counting`.
    """
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_counted(step: Any) -> None:
    """Says to schedulers that are attached later that `step` counts itself (`count_step`).

    Noticed by `tests/conversion/test_training_loop.py::test_a_scheduler_drives_a_compiled_optimizer`.
    """
    step._wrapped_by_lr_sched = True


def count_step(optimizer: Optimizer) -> None:
    """Says to the optimizer's schedulers that a step was taken: they warn if they are stepped before it.

    Noticed by `tests/conversion/test_compile_model.py::test_a_scheduler_attached_before_the_first_step_keeps_counting`.
    """
    unsafe: Any = optimizer
    unsafe._opt_called = True


def unscales_itself(optimizer: Optimizer) -> bool:
    """Returns True if GradScaler leaves the division of gradients to the step (optimizers with `fused=True`).

    Noticed by `tests/optimizers/test_torch_semantics.py::test_fused_does_not_step_where_the_scaler_found_inf`.
    """
    return bool(vars(optimizer).get("_step_supports_amp_scaling"))


def has_step_in_backward(p: torch.Tensor) -> bool:
    """Returns True for a parameter that `_apply_optimizer_in_backward` steps: nothing else says so.

    Noticed by `tests/conversion/test_wrapping.py::test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes`.
    """  # noqa: E501  # names of tests stay in one piece
    return hasattr(p, "_in_backward_optimizers")


# ---- modules

NORMS = torch.nn.modules.batchnorm._NormBase
"""The base of BatchNorm*, SyncBatchNorm and InstanceNorm*: those that take bf16 activations beside fp32 statistics.

Noticed by
`tests/conversion/test_buffers_running.py::test_a_norm_with_statistics_stays_fp32_as_a_whole_and_gives_what_it_gets`.
"""


def has_pre_hook(module: torch.nn.Module, hook: Any) -> bool:
    """Returns True if `hook` is registered: a module that is compiled twice gets it once.

    Noticed by
    `tests/conversion/test_buffers_running.py::test_what_stays_fp32_stays_so_when_the_optimizer_is_compiled_again`.
    """
    return hook in module._forward_pre_hooks.values()


def has_load_hook(module: torch.nn.Module, hook: Any) -> bool:
    """The same for hooks before `load_state_dict`, which torch wraps.

    Noticed by `tests/conversion/test_loaded_weights.py::test_a_model_that_is_compiled_twice_has_one_hook`.
    """
    found: Any = module._load_state_dict_pre_hooks.values()
    return any(wrapped.hook is hook for wrapped in found)


def drop_load_hook(module: torch.nn.Module, hook: Any) -> None:
    """Takes such a hook away; torch does so only for who has the handle, and a copied or pickled model has none.

    Noticed by `tests/conversion/test_loaded_weights.py::test_models_inside_of_one_another_warn_once`.
    """
    found: Any = module._load_state_dict_pre_hooks
    for key in [key for key, wrapped in found.items() if wrapped.hook is hook]:
        del found[key]


def contents(module: torch.nn.Module) -> dict[str, Any]:
    """Buffers and modules of a module by name, each as often as it is there; the public ways leave out repeated ones.

    Noticed by `tests/passes/test_host_state.py::test_a_compiled_step_leaves_the_trace_of_one_plain_step`.
    """
    return {**module._buffers, **module._modules}


# ---- parameters that are spread over processes

FSDP1 = "torch.distributed.fsdp._flat_param", "FlatParamHandle"
"""Module and class of what FSDP1 keeps of its flat parameters: no public list has them.

Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
"""


def is_flattened(p: torch.Tensor) -> bool:
    """Returns True for a parameter of FSDP1, with `use_orig_params` or without.

    Noticed by `tests/conversion/test_wrapping.py::test_fsdp1_of_fp32_parameters_is_rejected_in_every_form`.
    """
    return bool(getattr(p, "_fsdp_flattened", False))


def of_flat_parameter(handle: Any) -> set[torch.Tensor]:
    """A flat parameter of FSDP1 and the parameters that are views of it.

    Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
    """
    return {handle.flat_param, *(handle.flat_param._params or ())}


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Returns True for a module given to `fully_shard` (FSDP2), without an import of torch.distributed.

    Noticed by `tests/conversion/test_averaging.py::test_shards_and_replicas_end_with_the_average_of_one_process`.
    """
    return hasattr(module, "_get_fsdp_state")


def is_managed_by_fsdp(module: torch.nn.Module) -> bool:
    """Returns True for a module whose parameters FSDP1 or FSDP2 holds: both mark it for torch.compile.

    Noticed by `tests/matmuls/test_sharded.py::test_fsdp_is_rejected_before_compiling_and_after_it`.
    """
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def has_laid_out(module: torch.nn.Module) -> bool:
    """Returns True if FSDP2 has laid out its buffers: the first forward does, and sets `_is_root`.

    Noticed by `tests/distributed/test_sharding.py::test_a_model_that_fsdp_has_laid_out_in_fp32_is_refused_and_left_alone`.
    """  # noqa: E501  # names of tests stay in one piece
    state = getattr(module, "_get_fsdp_state", None)
    return state is not None and getattr(state(), "_is_root", None) is not None


def offset_of_shard(p: Any) -> Sequence[int]:
    """Where in a DTensor the part of this process begins, as torch.distributed.checkpoint asks.

    Noticed by `tests/distributed/test_sharding.py::test_given_the_same_gradients_the_update_has_the_same_bits`.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offset


def device_of_zero(zero: Any) -> torch.device:
    """The device on which torch's ZeroRedundancyOptimizer talks to other processes.

    Noticed by `tests/conversion/test_wrapping.py::test_a_nan_in_one_process_makes_all_skip_and_count`.
    """
    device: torch.device = zero._default_device
    return device


# ---- DistributedDataParallel: `DistributedDataParallel.__setstate__` makes a reducer in this way, and nothing public.
# Noticed by `tests/conversion/test_wrapping.py::test_every_option_of_ddp_is_kept_when_it_is_set_up_anew`, and what
# `ddp_problems` asks by the next one.

_DDP = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")


def ddp_problems(ddp: Any) -> list[str]:
    """Why a DistributedDataParallel cannot be set up anew: more than its reducer depends on the dtype.

    Noticed by `tests/conversion/test_wrapping.py::test_a_ddp_that_cannot_be_set_up_anew_is_rejected_before_anything_changes`.
    """  # noqa: E501  # names of tests stay in one piece
    problems = {
        "mixed_precision": ddp.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(ddp._delay_all_reduce_params),
        "a reducer in Python (torch._dynamo.config.optimize_ddp)": ddp._use_python_reducer,
        "optimizers that step in backward": any(map(has_step_in_backward, ddp.parameters())),
        "a communication hook that has run": bool(ddp._comm_hooks) and ddp._lazy_init_ran,
        "a communication hook of torch's own": not ddp._comm_hooks and _has_hook(ddp),
        f"a reducer that torch {torch.__version__} makes in a new way": not all(hasattr(ddp, n) for n in _DDP),
    }
    return [problem for problem, there in problems.items() if there]


def _has_hook(ddp: Any) -> bool:
    return bool(ddp._get_ddp_logging_data().get("comm_hook"))


def set_up_anew(ddp: Any) -> None:
    """Gives a DistributedDataParallel a reducer for its parameters as they are now, as unpickling it does.

    Every process has to do so between the same two steps: the order of buckets is agreed on in the next ones.
    Noticed by `tests/conversion/test_wrapping.py::test_every_option_of_ddp_is_kept_when_it_is_set_up_anew`.
    """
    ddp._remove_autograd_hooks()  # of parameters that were bf16 before, and keep their nodes
    parameters, sparse = ddp._build_params_for_reducer()
    ddp._ddp_init_helper(parameters, sparse, ddp._build_debug_param_to_name_mapping(parameters), ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    if ddp.static_graph:
        ddp._static_graph_delay_allreduce_enqueued = False  # the first backward learns the order of gradients
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    distributed: Any = torch.distributed
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        distributed._register_comm_hook(ddp.reducer, state, hook)


# ---- tensors without memory


def fake_tensors() -> AbstractContextManager[object]:
    """A mode in which tensors have shapes and dtypes, and no memory.

    Noticed by `tests/backends/nki/test_stable_keys.py::test_the_report_says_what_a_step_takes_of_the_host`.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # not all that read this file pay for its import

    mode: AbstractContextManager[object] = FakeTensorMode()
    return mode


# ---- torch_xla, which is an extra: imported only where parameters are on an XLA device


def user_computation(name: str, tensors: Sequence[torch.Tensor], computation: Any) -> Sequence[torch.Tensor]:
    """One node of the lazy graph that runs an HLO module: torch_xla has no public way to enter one.

    Noticed by `tests/backends/test_reference_and_xla.py::test_shapes_and_gradients_of_every_kind`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    results: Sequence[torch.Tensor] = xlac._xla_user_computation(name, tensors, computation)
    return results


def xla_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of two matrices of any dtypes, in fp32: `torch.mm` has one dtype, and `_scaled_mm` runs on the CPU.

    Noticed by `tests/matmuls/test_xla.py::test_every_product_is_a_dot_of_8_bits`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    product: torch.Tensor = xlac._xla_dot_general(a, b, (([1], [0]), ([], [])), None, torch.float32)
    return product


def xla_address(t: torch.Tensor) -> int:
    """The address of a tensor's values on torch_xla's CPU device; RuntimeError while they are not computed.

    The public `to_dlpack` ends the process in that case, and costs more.
    Noticed by `tests/backends/test_lent.py::test_memory_is_taken_back_where_nobody_else_refers_to_it`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    address: int = xlac._unsafe_buffer_pointer(t)
    return address


def mark_sharding_like(t: torch.Tensor, p: torch.Tensor) -> None:
    """Shards `t` over devices as `p` is; `mark_sharding` asks for the mesh, which a parameter does not have at hand.

    Noticed by `tests/distributed/test_spmd.py::test_every_word_is_sharded_as_its_parameter_was`.
    """
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    if xlac._get_xla_sharding_type(p) is not None:
        xlac._xla_mark_sharding(t, xlac._get_xla_op_sharding(p))


def is_of_xla_fsdp(p: torch.Tensor) -> bool:
    """Returns True for a parameter of XlaFullyShardedDataParallel.

    Noticed by `tests/conversion/test_wrapping.py::test_fsdp_of_torch_xla_is_rejected`.
    """
    return bool(getattr(p, "_is_sharded", False)) and hasattr(p, "_orig_size")


def groups_of_xla_zero(zero: Any) -> list[Any]:
    """The groups over which torch_xla's ZeroRedundancyOptimizer adds up the norm of gradients.

    The second is tensor parallelism's.
    Noticed by `tests/distributed/test_zero.py::test_a_nan_in_the_shard_of_one_rank_makes_all_skip`.
    """
    return [groups for groups in (zero.sharding_groups, zero._grad_norm_groups) if groups is not None]
