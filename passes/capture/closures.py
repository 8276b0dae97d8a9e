"""Closures: evaluates a user's closure once before the step, and gives every recording of the step its loss.

Given: `optimizer.step(closure)`, where `step` halves `group["lr"]` if the loss went up
Result: `closure()` runs once, before anything else, and each recording of the step receives its result
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture import surroundings
from collage_neuron.torch_privates import unhooked_step

ATTRIBUTE = "_collage_closure"
"""The attribute of an optimizer, and of its shadows, that holds the `Evaluated` of the step in progress."""


class Evaluated:
    """The result of a closure, wrapped in an object so that code that looks for numbers or tensors does not find it."""

    def __init__(self, loss: Any) -> None:
        self.loss = loss


def evaluated(optimizer: Optimizer) -> Evaluated | None:
    """The result of the closure of the step in progress; None in a step without a closure, and between steps."""
    return vars(optimizer).get(ATTRIBUTE)


def loss_of(optimizer: Optimizer) -> Any:
    """What the closure of the step in progress has returned; None without a closure."""
    found = evaluated(optimizer)
    return None if found is None else found.loss


@contextmanager
def given(optimizer: Optimizer, closure: Any, loss: Any) -> Iterator[None]:
    """A context in which each run of the optimizer's own step receives a closure that returns `loss`."""
    if closure is None:
        yield
        return
    vars(optimizer)[ATTRIBUTE] = Evaluated(loss)
    try:
        yield
    finally:
        del vars(optimizer)[ATTRIBUTE]


class Call(NamedTuple):
    """The arguments with which a step was called."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    closure: Any = None
    loss: Any = None
    """What the closure has returned, if it was evaluated."""
    problem: str = ""
    """Not empty if there are other arguments than a closure: a captured update cannot have them."""

    def evaluated(self) -> Call:
        """The same call once the closure was evaluated: the code gets one that does not do it again at first."""
        with torch.enable_grad():
            loss = self.closure()
        once = Once(self.closure, loss)
        args = tuple(once if x is self.closure else x for x in self.args)
        return self._replace(
            args=args, kwargs={k: once if x is self.closure else x for k, x in self.kwargs.items()}, loss=loss
        )


class Once:
    """A closure that was evaluated before the step, and may be evaluated again."""

    def __init__(self, closure: Any, loss: Any) -> None:
        self._closure, self._loss, self.is_new = closure, loss, True

    def result(self, is_current: bool) -> Any:
        """The loss that there is, once, if weights and gradients are still those of then; else another one."""
        is_current, self.is_new = is_current and self.is_new, False
        return self._loss if is_current else self._closure()

    def __call__(self) -> Any:
        """Evaluates the closure again."""
        return self._closure()


def call_of(base: type[Optimizer], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call of a step with these arguments."""
    try:
        return Call(args, kwargs, closure_among(base, args, kwargs))
    except TypeError as error:
        return Call(args, kwargs, problem=str(error))


class OwnStep(NamedTuple):
    """One run of a user's step."""

    run: Callable[[], Any]
    loss: Any = None
    """What its closure returns, in place of the loss; None without a closure."""

    def __call__(self) -> Any:
        return self.run()


@contextmanager
def own_step(base: type[Optimizer], shadow: Optimizer, recorded: Sequence[Any] | None = None) -> Iterator[OwnStep]:
    """The user's own step of `shadow`, to be called once.

    `recorded` is the list to which its operations are added. Without it the step computes on host data, with the loss.
    """
    found, step = evaluated(shadow), unhooked_step(base)
    if found is None:
        with surroundings.usual():
            yield OwnStep(partial(step, shadow))
        return
    loss = _own(found.loss, on_host=recorded is None)
    closure = _StandIn(loss, shadow, () if recorded is None else recorded)
    args, kwargs = _passed(base, closure)
    try:
        with surroundings.usual():
            yield OwnStep(partial(step, shadow, *args, **kwargs), loss)
    finally:
        closure.over = True
    if closure.error is not None:  # the step may have caught it
        raise closure.error


class _StandIn:
    """The closure passed to one run of a step: returns the loss, once, and only before anything is updated."""

    def __init__(self, loss: Any, shadow: Optimizer, recorded: Sequence[Any]) -> None:
        self._loss, self._recorded = loss, recorded
        self._grads = [(p, p.grad) for group in shadow.param_groups for p in group["params"]]
        self._called = self.over = False
        self.error: UnsupportedUpdate | None = None

    def __call__(self) -> Any:
        problem = self._problem()
        if problem:
            self.error = UnsupportedUpdate(
                f"the update calls its closure {problem}, and the closure of a compiled step is evaluated once, first; "
                "call it once, at the beginning of step(), compute the loss outside, or leave the optimizer uncompiled"
            )
            raise self.error
        self._called = True
        return self._loss

    def _problem(self) -> str | None:
        if self.over:
            return "after the step has returned"
        if self._called:
            return "a second time"
        if self._recorded or any(p.grad is not g for p, g in self._grads):
            return "after operations on the parameters, their gradients or states"
        return None


def _own(loss: Any, on_host: bool) -> Any:
    """A copy of the loss without its graph, which code may write to; on the host, or left on its device."""
    if isinstance(loss, torch.Tensor):
        return loss.detach().cpu().clone() if on_host else loss.detach().clone()
    if type(loss) in (list, tuple):
        return type(loss)(_own(x, on_host) for x in loss)
    return {k: _own(v, on_host) for k, v in loss.items()} if type(loss) is dict else loss


# --- the arguments of step --------------------------------------------------------------------------------------------


def check_arguments(base: type[Optimizer]) -> None:
    """Raises UnsupportedUpdate for a class whose `step` requires other arguments than a closure."""
    required = [p.name for p in _parameters(base) if p.default is p.empty and p.kind not in _VARIABLE]
    other = [name for name in required if name != "closure"]
    if other:
        raise UnsupportedUpdate(
            f"{base.__name__}.step() requires the argument {other[0]!r}, and a compiled step takes a closure only; "
            f"let step() read it from param_groups or from an attribute of the optimizer (self.{other[0]})"
        )


def closure_among(base: type[Optimizer], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure among the arguments of `step`, or None.

    Raises:
        TypeError: another argument is passed.
    """
    if not args and not kwargs:
        return None
    name, positional = _name(base), _positional(base)
    named = [(positional[i] if i < len(positional) else f"argument {i + 1}", x) for i, x in enumerate(args)]
    for key, value in (*named, *kwargs.items()):
        if key != name or not (value is None or callable(value)):
            raise TypeError(
                f"step() of a compiled {base.__name__} takes a closure only, got {key}={value!r}; put it into "
                f"param_groups (group[{key!r}] = ...) or an attribute of the optimizer, and let step() read it there; "
                "nothing was updated"
            )
    return next((value for _, value in (*named, *kwargs.items()) if value is not None), None)


def _passed(base: type[Optimizer], closure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that pass a closure to `step`; empty if `step` takes none."""
    name = _name(base)
    if any(p.name == name and p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
           for p in _parameters(base)):  # fmt: skip
        return (), {name: closure}
    if any(p.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL) for p in _parameters(base)):
        return (closure,), {}
    return (), {name: closure} if _parameters(base) else {}


_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def _parameters(base: type[Optimizer]) -> list[Parameter]:
    """The parameters of `step`, without `self`."""
    found = list(inspect.signature(unhooked_step(base)).parameters.values())
    return found[1:] if found and found[0].kind not in _VARIABLE else found


def _positional(base: type[Optimizer]) -> list[str]:
    """The names of the positional arguments."""
    names = [
        p.name for p in _parameters(base) if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return names or ["closure"]


def _name(base: type[Optimizer]) -> str:
    """The name of the closure argument: `closure`, or else the first one."""
    names = [p.name for p in _parameters(base)]
    return "closure" if "closure" in names else _positional(base)[0]
