"""Writes the operations of the numbers that a step computes from values that it has read (`number_table`).

Given: `clone(norm) -> r0`, then `add_(param, u, alpha=#3)`, where #3 is `mul(read 0, host 0.01)`
Result: `clone(norm) -> r0`, `mul(r0, s0) -> r1`, `add_(param, u, alpha=r1)`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.passes.capture.number_table import HOST, READ, Made
from collage_neuron.passes.capture.recorder import QUESTION, Asked, Op, Recorder, Ref, Slot, ref_of
from collage_neuron.torch_privates import schema

_TAKERS = frozenset(
    {"add", "sub", "rsub", "mul", "div", "addcmul", "addcdiv", "lerp", "clamp", "clamp_min", "clamp_max", "maximum",
     "minimum", "lt", "le", "gt", "ge", "eq", "ne", "masked_fill"}
)  # fmt: skip
"""Operations that take a number of the device, or a list of such: their rules read it as they read a tensor."""


def with_numbers(recorder: Recorder, ops: Sequence[Op], slots: Sequence[float]) -> Recorder:
    """The recording with the operations `ops`, whose slots are numbered in `slots`, and with those of its numbers.

    Comparisons that code has asked for are operations too, whose results nothing reads: so they are part of what is
    compared with other recordings.
    """
    writing = _Writing(recorder, slots)
    for op in ops:
        with pointing_at(op.place):
            writing.add(op)
    return writing.written


class _Writing:
    def __init__(self, recorder: Recorder, slots: Sequence[float]) -> None:
        self.written = Recorder()
        self.written.reads = recorder.reads
        self.written.keep([recorder])  # its tensors, whose addresses are their names
        self._numbers, self._reads, self._slots = recorder.reading.numbers, recorder.reads, slots
        self._refs: dict[Made, Ref] = {}
        self._answers = (asked.answer for asked in recorder.asked)

    def add(self, op: Op) -> None:
        """Writes an operation, after those of the numbers that it takes."""
        for made in _numbers_in((op.args, op.kwargs)):
            if op.target is not QUESTION and self._numbers.of(made).target is not HOST:
                _check_taken(op)
            self._write(made, op)
        if op.target is QUESTION:
            self.written.asked.append(Asked(self._refs[op.args[0]], next(self._answers)))
        else:
            args, kwargs = self._all(op.args), self._all(op.kwargs)
            self.written.ops.append(op._replace(args=args, kwargs=kwargs))

    def _write(self, made: Made, op: Op) -> None:
        """Writes the operations of a number, and before them those of the numbers that it is computed from."""
        target, args = self._numbers.of(made)
        if target in (HOST, READ) or made in self._refs:
            return
        for x in _numbers_in(args):
            self._write(x, op)
        out = torch.empty((), device="meta", dtype=torch.float32)
        self.written.keep([out.untyped_storage()])
        self._refs[made] = ref_of(out)
        self.written.ops.append(Op(target, self._all(args), (), (self._refs[made],), op.place))

    def _all(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(map(self._argument, found))

    def _argument(self, x: Any) -> Any:
        """What an argument is in the recording: slots are numbered in the order in which operations take them."""
        if type(x) is Slot:
            return self._slot(self._slots[x.number])
        if type(x) is not Made:
            return self._all(x) if type(x) is tuple else x
        target, args = self._numbers.of(x)
        if target is HOST:
            return self._slot(args[0])
        return self._reads[args[0]] if target is READ else self._refs[x]

    def _slot(self, value: float) -> Slot:
        self.written.slots.append(value)
        return Slot(len(self.written.slots) - 1)


def _numbers_in(x: tuple[Any, ...]) -> Iterator[Made]:
    for y in x:
        if type(y) is Made:
            yield y
        elif type(y) is tuple:
            yield from _numbers_in(y)


def _check_taken(op: Op) -> None:
    name = schema(op.target).name.removeprefix("aten::").removeprefix("_foreach_").rstrip("_")
    if name not in _TAKERS:
        raise UnsupportedUpdate(
            f"the update reads a tensor's value back into Python (.item()) and gives it to {op.target}, which takes "
            "numbers of the host only; compute with it, or keep it a tensor"
        )
