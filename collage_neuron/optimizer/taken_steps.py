"""Answers for steps in progress that are taken already: torch's wrapper gets them instead of running the step's code.

A hook before a step can exchange the step's arguments, and cannot say that there is nothing left to do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch.optim import Optimizer

from collage_neuron.torch_privates import not_compiled

_LOCK = threading.Lock()  # two threads may step optimizers of one class


@dataclass(frozen=True)
class _Answer:
    optimizer: Optimizer
    result: Any
    steps: Sequence[CellType]


class _Answering:
    """In the place of the code of `step`: returns the answers that wait, and runs the code for all other optimizers."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.waiting: dict[int, _Answer] = {}

    @not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            answer = self.waiting.get(id(args[0])) if args else None
            if answer is not None:
                _take_back(answer)
        return self.step(*args, **kwargs) if answer is None else answer.result


def answer(steps: Sequence[CellType], optimizer: Optimizer, result: Any) -> None:
    """Lets the step in progress return `result` when it is called for `optimizer`, once; its code does not run.

    `steps` are `torch_privates.hooked_steps`, which are afterwards what they were.
    """
    with _LOCK:
        for step in steps:
            if not isinstance(step.cell_contents, _Answering):
                step.cell_contents = _Answering(step.cell_contents)
            step.cell_contents.waiting[id(optimizer)] = _Answer(optimizer, result, steps)


def _take_back(answer: _Answer) -> None:
    for step in answer.steps:
        answering = step.cell_contents
        if isinstance(answering, _Answering):
            answering.waiting.pop(id(answer.optimizer), None)
            step.cell_contents = answering if answering.waiting else answering.step
