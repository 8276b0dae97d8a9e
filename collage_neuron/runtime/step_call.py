"""The call of a step: its arguments, a closure evaluated before it, what is left to it, and what it runs without.

`torch.amp.GradScaler` leaves two tasks to a fused optimizer, by two attributes: the step must divide gradients by
`grad_scale` unless it is None, and must be skipped if `found_inf` is not zero. For any other optimizer it does both
itself.
"""

from __future__ import annotations

import gc
import inspect
import os
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsafeEnvironment
from collage_neuron.states.bookkeeping import params_of


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
        """Evaluates the closure; returns the call with one that does not do it again at first."""
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


_NO_ARGUMENTS = Call()


def call_of(base: type[Optimizer], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call of a step with these arguments."""
    if not args and not kwargs:
        return _NO_ARGUMENTS
    try:
        return Call(args, kwargs, closure_among(base, args, kwargs))
    except TypeError as error:
        return Call(args, kwargs, problem=str(error))


@dataclass(frozen=True)
class Measured:
    """The measurements of one parameter's update."""

    param: torch.nn.Parameter
    names: tuple[tuple[str, ...], tuple[str, ...]]
    """The names of the sums and of the counts (`passes/rewrite/instrument.py`)."""
    sums: torch.Tensor
    counts: torch.Tensor
    """Vectors on the parameter's device, not fetched yet."""
    number: Any
    """The optimizer's own count after the step, a number on the host; None if it has none."""


# --- the arguments of step --------------------------------------------------------------------------------------------


def closure_among(base: type[Optimizer], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The closure among the arguments of `step`, or None.

    Raises:
        TypeError: another argument is passed.
    """
    if not args and not kwargs:
        return None
    positional, name = _parameters(torch_privates.unhooked_step(base))
    named = [(positional[i] if i < len(positional) else f"argument {i + 1}", x) for i, x in enumerate(args)]
    for key, value in (*named, *kwargs.items()):
        if key != name or not (value is None or callable(value)):
            raise TypeError(
                f"step() of a compiled {base.__name__} takes a closure only, got {key}={value!r}; put it into "
                f"param_groups (group[{key!r}] = ...) or an attribute of the optimizer, and let step() read it there"
            )
    return next((value for _, value in (*named, *kwargs.items()) if value is not None), None)


@lru_cache(256)
def _parameters(step: Any) -> tuple[list[str], str]:
    """The names of the positional parameters of a `step`, and that of its closure."""
    parameters = list(inspect.signature(step).parameters.values())
    if parameters and parameters[0].kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        del parameters[0]  # `self`
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in parameters if p.kind in kinds] or ["closure"]
    return positional, "closure" if any(p.name == "closure" for p in parameters) else positional[0]


# --- torch.amp.GradScaler ---------------------------------------------------------------------------------------------


_LEFT_TO_STEP = ("grad_scale", "found_inf")


def is_left_a_task(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer has one of the two attributes."""
    return not vars(optimizer).keys().isdisjoint(_LEFT_TO_STEP)


@contextmanager
def scaler_attributes(optimizer: Optimizer) -> Iterator[dict[str, torch.Tensor | None]]:
    """Removes the two attributes from an optimizer, since a step that is not fused does not know them."""
    held = vars(optimizer)
    names = _LEFT_TO_STEP if torch_privates.unscales_itself(optimizer) else ()
    taken = {name: held.pop(name) for name in names if name in held}
    try:
        yield taken
    finally:
        held.update(taken)


def unscale(optimizer: Optimizer, left: dict[str, torch.Tensor | None]) -> bool:
    """Divides gradients by their scale, in place as a fused step does; returns False if the step is to be skipped."""
    found_inf, scale = left.get("found_inf"), left.get("grad_scale")
    if found_inf is not None and found_inf.item() != 0:
        return False
    if scale is not None:
        for p in (p for p in params_of(optimizer) if p.grad is not None):
            p.grad.div_(scale.to(p.grad.device))
    return True


# --- what a process may have set: a step runs without it --------------------------------------------------------------


# Equals zero just if this thread takes subnormal numbers for zero: torch has no function that says so.
_SUBNORMAL = 5e-324

_NOTHING = nullcontext()


class _DefaultDtype:
    """fp32 as the default dtype, which all threads of a process share.

    The last of several steps that run at once restores what the first one has replaced.
    """

    def __init__(self) -> None:
        self._lock, self.inside, self._before = threading.Lock(), 0, torch.float32

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if not self.inside:
                torch.set_default_dtype(self._before)


_FP32 = _DefaultDtype()


def plain_defaults() -> AbstractContextManager[None]:
    """A context in which tensors are made in fp32 on the CPU unless said otherwise, and subnormal numbers are kept.

    A user's step runs in it too, so that the numbers that it makes (`torch.tensor(0.1)`) are those of an fp32 run, as
    are its parameters. Other threads of torch flush subnormal numbers as before: a thread takes the mode of the one
    that started it.
    """
    # `torch.get_default_device` fails after `torch.set_default_device(None)`.
    flushes, elsewhere = _SUBNORMAL == 0.0, not torch.empty(0).is_cpu
    other = _FP32.inside or torch.get_default_dtype() is not torch.float32
    return _changed(flushes, elsewhere) if flushes or elsewhere or other else _NOTHING


@contextmanager
def _changed(flushes: bool, elsewhere: bool) -> Iterator[None]:
    # The numbers of a step are the host's, on which their addresses are read.
    with torch.device("cpu") if elsewhere else _NOTHING, _FP32:
        if flushes:
            torch.set_flush_denormal(False)
        try:
            yield
        finally:
            if flushes:
                torch.set_flush_denormal(True)


class CollectorPaused:
    """A context without collections, for work that makes many objects and leaves no cycles: recordings of a step.

    Each of its collections would look at all objects of the process. What is garbage by then is collected afterwards.
    The collector is not switched off: code that asks for that, or does it, is none of ours.
    """

    def __enter__(self) -> None:
        self._before = gc.get_threshold()
        gc.set_threshold(0, *self._before[1:])  # of new objects, from which on they are collected; 0 is never

    def __exit__(self, *_: object) -> None:
        if not gc.get_threshold()[0]:  # else somebody has set it meanwhile, or another thread has ended its own pause
            gc.set_threshold(*self._before)


# --- what a process may have set: no step runs with it ----------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """The result of one check; `problem` is None if there is none."""

    name: str
    value: str
    problem: str | None


def _switch(variable: str, problem: str, environ: Mapping[str, str]) -> Finding:
    value = environ.get(variable, "")
    on = value.strip().lower() not in ("", "0", "false", "no", "off")  # of numbers, torch_xla takes all but 0 as true
    return Finding(variable, value or "unset", problem if on else None)


def auto_cast(flags: str) -> str:
    """The value of neuronx-cc's --auto-cast in NEURON_CC_FLAGS; the last one counts, and `none` is the default."""
    try:
        words = shlex.split(flags.replace("=", " "))
    except ValueError:  # a quotation mark without another one, which is the compiler's to reject
        words = flags.replace("=", " ").split()
    return next((words[i + 1] for i in range(len(words) - 2, -1, -1) if words[i] == "--auto-cast"), "none")


def environment_findings() -> Sequence[Finding]:
    """The settings of the process that affect roundings, one finding per setting."""
    return _findings(tuple(map(os.environ.get, _VARIABLES)))


_VARIABLES = ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_CC_FLAGS")


@lru_cache  # every step asks, and the settings seldom change
def _findings(values: tuple[str | None, ...]) -> tuple[Finding, ...]:
    environ = {name: value for name, value in zip(_VARIABLES, values, strict=True) if value is not None}
    bf16 = "turns every fp32 value into bf16, the optimizer's included; unset it and use model.to(torch.bfloat16)"
    cast = auto_cast(environ.get("NEURON_CC_FLAGS", ""))
    return (
        _switch(
            "NEURON_RT_STOCHASTIC_ROUNDING_EN",
            "makes every rounding of the process stochastic, which destroys error-free transforms; set it to 0 before "
            "the first graph is loaded (Neuron documentation: neuron-features/rounding-modes)",
            environ,
        ),
        _switch("XLA_USE_BF16", bf16, environ),
        _switch("XLA_DOWNCAST_BF16", bf16, environ),
        Finding(
            "NEURON_CC_FLAGS --auto-cast",
            cast,
            "casts the optimizer's fp32 values to a narrower format; use --auto-cast=none" if cast == "all" else None,
        ),
    )


def check_environment() -> None:
    """Raises UnsafeEnvironment for the first finding with a problem."""
    if problem := _problem(tuple(map(os.environ.get, _VARIABLES))):
        raise UnsafeEnvironment(problem)


@lru_cache
def _problem(values: tuple[str | None, ...]) -> str | None:
    return next((f"{f.name} ({f.value}) {f.problem}" for f in _findings(values) if f.problem), None)
