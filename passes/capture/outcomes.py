"""Records a step once for each outcome of the comparisons that it makes of numbers read from tensors, and merges these.

Given: `alpha = max(1e-3, p.norm().item()) * rate`, and `p.add_(u, alpha=-alpha)`
Result: `p.add_(u, alpha=where(norm > 1e-3, -(norm * rate), -(1e-3 * rate)))`, with the last product computed by Python

What a step does for each outcome has to be the same but for numbers: then the outcome selects among these, on the
device. If it selects nothing, or the step does something else too, the step is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.passes.capture.number_ops import with_numbers
from collage_neuron.passes.capture.number_table import Made, Numbers
from collage_neuron.passes.capture.recorder import QUESTION, Op, Recorder, Ref, Slot

aten = torch.ops.aten

MOST = 8
"""Recordings of one step: those of three comparisons."""


class Traced(NamedTuple):
    """One recording of a step: its operations, its parameter's tensors before and after, and all else that it did."""

    recorder: Recorder
    before: dict[str, Ref]
    now: dict[str, Ref]
    others: dict[str, Any]
    """Fields of a `Recording`."""
    recordings: int = 1
    """How many this was merged from."""


Take = Callable[[Numbers, tuple[bool, ...]], Traced]
"""Records the step, given the answers to the first comparisons of numbers."""


def recorded(take: Take) -> tuple[Traced, Traced | None]:
    """The recording of a step for all outcomes; and, if it asks for some, that of all being true, for comparisons."""
    numbers = Numbers()
    first = take(numbers, ())
    if not first.recorder.reads:
        return first, None
    if not first.recorder.asked:
        return first._replace(recorder=written(first.recorder)), None
    found = _all(take, numbers, first)
    merged = with_numbers(first.recorder, _merged(found, 0).ops, ())
    return (
        first._replace(recorder=merged, recordings=len(found)),
        first._replace(recorder=written(first.recorder)),
    )


def written(recorder: Recorder) -> Recorder:
    """A recording with the operations of its numbers, for the answers that it was given."""
    return with_numbers(recorder, recorder.ops, recorder.slots) if recorder.reads else recorder


def _all(take: Take, numbers: Numbers, first: Traced) -> list[Traced]:
    """The recordings for all outcomes."""
    found, waiting = [first], _others(first, 0)
    while waiting:
        if len(found) + len(waiting) > MOST:
            with pointing_at(first.recorder.ops[-1].place):
                raise UnsupportedUpdate(
                    "the update compares values that it reads from tensors (max, min) more than three times; use "
                    "clamp, or torch.maximum, on tensors"
                )
        answers = waiting.pop()
        found.append(take(numbers, answers))
        waiting += _others(found[-1], len(answers))
    return found


def _others(traced: Traced, known: int) -> list[tuple[bool, ...]]:
    """The outcomes that differ from those of a recording first at one of its questions after the `known` ones."""
    answers = tuple(x.answer for x in traced.recorder.asked)
    return [(*answers[:i], False) for i in range(known, len(answers))]


class _Path(NamedTuple):
    """What a step does for some outcomes: as it is recorded, with all numbers from the table."""

    traced: Traced
    ops: list[Op]


def _merged(found: Sequence[Traced], depth: int) -> _Path:
    """What a step does for the outcomes of all these recordings, which agree on the first `depth` questions."""
    if len(found) == 1:
        return _path(found[0])
    (question, *others) = {x.recorder.asked[depth].comparison for x in found}
    if others:
        _refuse(found[0], "compares other numbers when it is recorded again")
    sides = [[x for x in found if x.recorder.asked[depth].answer is answer] for answer in (True, False)]
    yes, no = (_merged(side, depth + 1) for side in sides)
    return yes._replace(ops=_Merging(yes, no, question).ops())


def _path(traced: Traced) -> _Path:
    recorder = traced.recorder

    def of_table(x: Any) -> Any:
        if type(x) is Slot:
            return recorder.reading.numbers.host(recorder.slots[x.number])
        return tuple(map(of_table, x)) if type(x) is tuple else x

    return _Path(traced, [op._replace(args=of_table(op.args), kwargs=of_table(op.kwargs)) for op in recorder.ops])


class _Merging:
    """Merges two paths of a step, of which one is taken if `question` is true."""

    def __init__(self, yes: _Path, no: _Path, question: Made) -> None:
        self._yes, self._no, self._question = yes, no, question
        self._numbers = yes.traced.recorder.reading.numbers
        self._same: dict[int, int] = {}
        """The tensors of the first path, and which they are in the other."""
        self._back: dict[int, int] = {}
        self._selects = False

    def ops(self) -> list[Op]:
        """The operations of both, with numbers that are selected where they differ."""
        ours, theirs = self._yes, self._no
        found = [[op for op in x.ops if op.target is not QUESTION] for x in (ours, theirs)]
        if len(found[0]) != len(found[1]):
            self._differs()
        self._argument(tuple(ours.traced.before.items()), tuple(theirs.traced.before.items()))
        merged = [self._op(x, y) for x, y in zip(*found, strict=True)]
        self._argument(tuple(ours.traced.now.items()), tuple(theirs.traced.now.items()))
        if repr(_told(ours.traced.others)) != repr(_told(theirs.traced.others)):
            self._differs()
        if not self._selects:
            _refuse(ours.traced, "compares a value that it reads from a tensor, which changes no number")
        return merged

    def _op(self, x: Op, y: Op) -> Op:
        if x.target is not y.target:
            self._differs(x)
        args, kwargs, _ = (
            self._argument(a, b, x) for a, b in ((x.args, y.args), (x.kwargs, y.kwargs), (x.outs, y.outs))
        )
        return x._replace(args=args, kwargs=kwargs)

    def _argument(self, x: Any, y: Any, op: Op | None = None) -> Any:
        if type(x) is not type(y):
            self._differs(op)
        if type(x) is Made:
            return x if x == y else self._selected(x, y)
        if type(x) is Ref:
            there, back = self._same.setdefault(x.storage, y.storage), self._back.setdefault(y.storage, x.storage)
            if x[1:] != y[1:] or (there, back) != (y.storage, x.storage):
                self._differs(op)
        elif isinstance(x, tuple):
            if len(x) != len(y):
                self._differs(op)
            return tuple(self._argument(a, b, op) for a, b in zip(x, y, strict=True))
        elif repr(x) != repr(y):
            self._differs(op)
        return x

    def _selected(self, x: Made, y: Made) -> Made:
        self._selects = True
        return self._numbers.add(aten.where.self, self._question, x, y)

    def _differs(self, op: Op | None = None) -> NoReturn:
        _refuse(self._yes.traced, "does something else for each outcome of a comparison", op)


def _told(others: Any) -> Any:
    """All that a step did beside its operations, as what is equal for equal numbers."""
    if isinstance(others, dict):
        return {k: _told(v) for k, v in others.items()}
    return (others.dtype, others.tolist()) if isinstance(others, torch.Tensor) else others


def _refuse(traced: Traced, what: str, op: Op | None = None) -> NoReturn:
    asked = next(x for x in traced.recorder.ops if x.target is QUESTION)
    with pointing_at((op or asked).place):
        raise UnsupportedUpdate(
            f"the update reads a tensor's value back into Python (.item()) and {what}; only max and min of such values "
            "can be rewritten: branch with torch.where, or leave it uncompiled"
        )
