"""Private names of torch.optim and of learning rate schedulers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from types import CellType
from typing import Any

from torch.optim import Optimizer


def unhooked_step(base: type[Optimizer]) -> Any:
    """`base.step` without the wrapper in which torch runs an optimizer's hooks, which have run already.

    Noticed by `tests/eager/test_as_written.py::test_schedulers_hooks_and_a_state_of_no_parameter`.
    """
    step: Any = base.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def hooked_steps(base: type[Optimizer]) -> list[CellType]:
    """Where torch's wrappers of `base.step` and of those that it overrides hold the code that they run between hooks.

    No public way exchanges that of a step in progress, whose hooks have begun (`optimizer/bypass.py`). Noticed by
    `tests/conversion/test_compile_model.py::test_the_first_step_runs_its_own_code_once`.
    """
    return [cell for cls in base.__mro__ for cell in _code_in(vars(cls).get("step"))]


def _code_in(step: Any) -> Iterator[CellType]:
    code = Optimizer.profile_hook_step(_code_in).__code__  # all its wrappers share it
    while step is not None:
        if getattr(step, "__code__", None) is code:
            yield step.__closure__[code.co_freevars.index("func")]
        step = getattr(step, "__wrapped__", None)


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
    hooks: Any = optimizer._optimizer_step_pre_hooks  # by the ids of handles
    handle = next((key for key, other in hooks.items() if other is hook), None)
    if handle is None:
        Optimizer.register_step_pre_hook(optimizer, hook)
    else:
        hooks.move_to_end(handle)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks that run before the steps of an optimizer: no public way tells which there are.

    Noticed by `tests/trace/test_inner.py::test_an_optimizer_inside_a_compiled_one_cannot_be_used_by_itself`.
    """
    hooks: Any = vars(optimizer).get("_optimizer_step_pre_hooks", {})
    return list(hooks.values())


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns True if hooks can be added: a constructor that does not call torch's may make none, or a plain `dict`.

    Noticed by `tests/trace/test_inner.py::test_what_cannot_be_compiled_with_its_inner_one_is_rejected`.
    """
    return all(isinstance(vars(optimizer).get(name), OrderedDict) for name in _HOOKS)


def let_have_hooks(optimizer: Optimizer) -> None:
    """Gives an optimizer what its constructor did not: handles of hooks refer weakly to ordered dictionaries.

    Noticed by `tests/trace/test_inner.py::test_twenty_steps_are_those_of_plain_torch`.
    """
    if not has_hooks(optimizer):
        vars(optimizer).update({name: OrderedDict(vars(optimizer).get(name, {})) for name in _HOOKS})


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch keeps the hooks of steps, which it makes in its constructor and nowhere else.

Noticed by `tests/trace/test_inner.py::test_twenty_steps_are_those_of_plain_torch`.
"""


def is_of_torch(name: str) -> bool:
    """Returns True for an attribute that `Optimizer` keeps hooks and profiling in.

    Noticed by
    `tests/runtime/test_exact_methods.py::test_numbers_groups_and_attributes_are_those_of_the_plain_optimizer`.
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

    Noticed by `tests/optimizers/test_optim_db.py::test_fused_does_not_step_where_the_scaler_found_inf`.
    """
    return bool(vars(optimizer).get("_step_supports_amp_scaling"))
