"""Private names of torch.optim and of learning rate schedulers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from types import CellType, CodeType
from typing import Any

from torch.optim import Optimizer


def unhooked_step(base: type[Optimizer]) -> Any:
    """`base.step` without the wrapper in which torch runs an optimizer's hooks, which have run already."""
    step: Any = base.step
    # `hooked` says less: a wrapper that somebody has put around it by functools.wraps has this attribute too.
    return step.__wrapped__ if getattr(step, "__code__", None) is _wrapper_code() else step


def hooked_steps(base: type[Optimizer]) -> list[CellType]:
    """Where torch's wrappers of `base.step` and of those that it overrides hold the code that they run between hooks.

    No public way exchanges that of a step in progress, whose hooks have begun (`optimizer/bypass.py`).
    """
    return [cell for cls in base.__mro__ for cell in _code_in(vars(cls).get("step"))]


def _code_in(step: Any) -> Iterator[CellType]:
    code = _wrapper_code()
    while step is not None:
        if getattr(step, "__code__", None) is code:
            yield step.__closure__[code.co_freevars.index("func")]
        # Others may have put wrappers of their own around it.
        step = getattr(step, "__wrapped__", None)


@cache
def _wrapper_code() -> CodeType:
    """The code that all wrappers of torch share."""
    code: CodeType = Optimizer.profile_hook_step(_code_in).__code__
    return code


def mark_hooked(step: Any) -> None:
    """Says that `step` runs hooks already: an object that changes its class is not wrapped by `Optimizer.__init__`."""
    step.hooked = True


def put_last(optimizer: Optimizer, hook: Any) -> None:
    """Runs `hook` before steps, after all other hooks of the optimizer: no public way moves one that is there."""
    hooks: Any = optimizer._optimizer_step_pre_hooks  # by the ids of handles
    handle = next((key for key, other in hooks.items() if other is hook), None)
    if handle is None:
        Optimizer.register_step_pre_hook(optimizer, hook)
    else:
        hooks.move_to_end(handle)


def step_pre_hooks(optimizer: Optimizer) -> list[Any]:
    """The hooks that run before the steps of an optimizer: no public way tells which there are."""
    hooks: Any = vars(optimizer).get("_optimizer_step_pre_hooks", {})
    return list(hooks.values())


def has_hooks(optimizer: Optimizer) -> bool:
    """Returns True if hooks can be added: a constructor that does not call torch's may make none, or a plain `dict`."""
    return all(isinstance(vars(optimizer).get(name), OrderedDict) for name in _HOOKS)


def let_have_hooks(optimizer: Optimizer) -> None:
    """Gives an optimizer what its constructor did not: handles of hooks refer weakly to ordered dictionaries."""
    if not has_hooks(optimizer):
        vars(optimizer).update({name: OrderedDict(vars(optimizer).get(name, {})) for name in _HOOKS})


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch keeps the hooks of steps, which it makes in its constructor and nowhere else."""


OF_TORCH = ("_optimizer_", "_hook_for_profile")
"""How the names of attributes begin that `Optimizer` keeps hooks and profiling in."""


def is_counted_by_scheduler(step: Any) -> bool:
    """Returns True for an `optimizer.step` that a learning rate scheduler has put in the place of the class's."""
    return hasattr(step, "_wrapped_by_lr_sched")


def mark_counted(step: Any) -> None:
    """Says to schedulers that are attached later that `step` counts itself (`count_step`)."""
    step._wrapped_by_lr_sched = True


def count_step(optimizer: Optimizer) -> None:
    """Says to the optimizer's schedulers that a step was taken: they warn if they are stepped before it."""
    unsafe: Any = optimizer
    unsafe._opt_called = True


def unscales_itself(optimizer: Optimizer) -> bool:
    """Returns True if GradScaler leaves the division of gradients to the step (optimizers with `fused=True`)."""
    return bool(vars(optimizer).get("_step_supports_amp_scaling"))
