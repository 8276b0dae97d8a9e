"""Handles steps that bypass the compiled class, through an `optimizer.step` kept in a variable or in torch.compile.

Such a bound method runs the optimizer's own code on bf16 weights. A hook of the optimizer, always its last one, takes
the compensated step instead. That code does not run then: it would count, draw and schedule once more. It is called for
an optimizer without parameters, so that it could not touch any, and torch's wrapper gets the answer of the step that
was taken: a hook can exchange the step's arguments, and cannot say that there is nothing left to do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import wraps
from types import CellType
from typing import Any

from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.inner_optimizers import Inside, inner_of, inside_hooks, mark
from collage_neuron.states.living_optimizers import note_compiled
from collage_neuron.torch_privates import not_compiled


def noted(step: Any) -> Any:
    """Marks the step of a compiled class, so that the hook knows when it is in progress."""

    # A compiler around the training loop would fuse the update and keep excess precision in it.
    @torch_privates.not_compiled
    @wraps(step)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer = vars(self).get("_collage_stepping", False)  # a step as written may call itself
        self._collage_stepping = True
        try:
            return step(self, *args, **kwargs)
        finally:
            self._collage_stepping = outer

    return noted


def watch(optimizer: Optimizer) -> None:
    """Adds the hook to a compiled optimizer, or moves it behind hooks of the user that were added since.

    Optimizers inside it have hooks too: outside of its step their states are not there.
    """
    note_compiled(optimizer)
    torch_privates.let_have_hooks(optimizer)
    torch_privates.put_last(optimizer, _take_over)
    for each in inner_of(optimizer):
        _watch_inside(each.optimizer, optimizer)
    mark(optimizer)


def _watch_inside(inside: Optimizer, outer: Optimizer) -> None:
    if any(hook.is_of(outer) for hook in inside_hooks(inside)):
        return
    hook = Inside(inside, outer)
    torch_privates.let_have_hooks(inside)
    with suppress(AttributeError):  # of a class whose constructor does not call torch's: it asks another one
        inside.register_step_pre_hook(hook)
        Optimizer.register_state_dict_pre_hook(inside, hook)
        Optimizer.register_load_state_dict_pre_hook(inside, hook)


def _take_over(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    cls: Any = type(optimizer)
    if "_collage_base" not in vars(cls) or vars(optimizer).get("_collage_stepping", False):
        return None  # the step in progress is not that of the original class
    return _taken_over(optimizer, args, kwargs)


@torch_privates.not_compiled  # not for a compiler that compiles the step
def _taken_over(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    cls: Any = type(optimizer)
    if inner_of(optimizer):
        raise UnsupportedUpdate(
            f"this {cls._collage_base.__name__}.step() is from before compiling, and steps another optimizer, which "
            "could not be kept from it; call optimizer.step() again, and not a bound method kept in a variable, "
            "or compiled by torch.compile; nothing was updated"
        )
    steps = torch_privates.hooked_steps(cls._collage_base)
    if not steps:
        raise UnsupportedUpdate(
            f"this {cls._collage_base.__name__}.step() is from before compiling, and the class has another one now, so "
            "that its code could not be kept from running; call optimizer.step() again, and not a bound method that is "
            "kept in a variable; nothing was updated"
        )
    compiled: Any = super(cls, optimizer)  # `Compiled`: its step without hooks, which are running already
    loss = noted(compiled.step.__func__)(optimizer, *args[1:], **kwargs)
    empty = _without_parameters(optimizer)
    answer(steps, empty, loss)
    return (empty, *args[1:]), kwargs


def _without_parameters(optimizer: Any) -> Optimizer:
    empty: Optimizer = object.__new__(type(optimizer)._collage_base)
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = [dict(group, params=[]) for group in optimizer.param_groups]
    return empty


# --- answers for steps that are taken ---------------------------------------------------------------------------------


_LOCK = threading.Lock()  # two threads may step optimizers of one class


class _Answering:
    """In the place of the code of `step`: returns the answers that wait, and runs the code for all other optimizers."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.waiting: dict[int, tuple[Optimizer, Any, Sequence[CellType]]] = {}
        """By the identity of an optimizer: itself, the answer, and the steps that wait for it."""

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            answer = self.waiting.get(id(args[0])) if args else None
            for step in answer[2] if answer is not None else ():
                answering = step.cell_contents
                if isinstance(answering, _Answering):
                    answering.waiting.pop(id(args[0]), None)
                    step.cell_contents = answering if answering.waiting else answering.step
        return self.step(*args, **kwargs) if answer is None else answer[1]


def answer(steps: Sequence[CellType], optimizer: Optimizer, result: Any) -> None:
    """Lets the step in progress return `result` when it is called for `optimizer`, once; its code does not run.

    `steps` are `torch_privates.hooked_steps`, which are afterwards what they were.
    """
    with _LOCK:
        for step in steps:
            if not isinstance(step.cell_contents, _Answering):
                step.cell_contents = _Answering(step.cell_contents)
            step.cell_contents.waiting[id(optimizer)] = optimizer, result, steps
