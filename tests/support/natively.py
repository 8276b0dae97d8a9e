"""Native code beside the reference: the same update on the same tensors, compared in every bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.backend import Native
from collage_neuron.passes.backends.native.jobs import lay_out
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.ir.update import Update

INEXACT = frozenset({torch.exp, torch.log, torch.pow})
"""The operations whose bits may differ from those of the reference."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def different(found: Tensor, wanted: Tensor) -> Tensor:
    """Where two tensors differ: in any bit of a number, the sign of a zero too; any NaN is like any other."""
    bits = [t.detach().contiguous().view(INTEGERS[t.dtype.itemsize]) for t in (found, wanted)]
    return (bits[0] != bits[1]) & ~(found.isnan() & wanted.isnan())


def copies_of(launches: Sequence[Launch]) -> list[Launch]:
    """The same launches on copies of their tensors; a tensor that occurs twice is one tensor again."""
    made: dict[int, Tensor] = {}

    def copied(rows: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        return [[made.setdefault(id(t), t.detach().clone()) for t in row] for row in rows]

    return [
        x._replace(
            reads=copied(x.reads), writes=copied(x.writes), kept=None,
            small=[dict(zip(states, copied([[*states.values()]])[0], strict=True)) for states in x.small],
        )
        for x in launches
    ]  # fmt: skip


def results(backend: Backend, update: Update, inputs: Sequence[Tensor], scalars: Tensor | None = None) -> list[Tensor]:
    """What an update writes to new tensors: of the dtype of the input with the same key, else fp32."""
    given = dict(zip(update.inputs, inputs, strict=True))
    written = [torch.zeros_like(given.get(key, inputs[0].float())) for key in update.outputs]
    vector = torch.zeros(len(update.scalars.entries)) if scalars is None else scalars
    backend.run([Launch(update, vector, [list(inputs)], [written])])
    return written


def assert_same(update: Update, found: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]) -> None:
    """All results of all parameters are the same, but the integer words of a NaN, which are not defined.

    Those follow from the bits of a NaN, and torch's maximum gives other ones in its vectors than after the last one.
    """
    first = {key: name for name, fmt in update.formats.items() for key in fmt.keys(name)[1:]}
    for number, (xs, ys) in enumerate(zip(found, wanted, strict=True)):
        given = dict(zip(update.outputs, xs, strict=True))
        for key, x, y in zip(update.outputs, xs, ys, strict=True):
            bad = different(x, y)
            if key in first and not x.is_floating_point():
                bad &= ~given[first[key]].isnan()
            assert not bad.any(), f"{int(bad.sum())} of {x.numel()} elements of {key}, parameter {number}: {x[bad][:4]}"


def assert_same_measures(found: Sequence[Measure], wanted: Sequence[Measure]) -> None:
    """Counts are equal, and sums but for roundings to fp32 in short runs, of at most 32 terms: 2**-19 of magnitudes.

    Those of a product of two numbers are at most the larger one of their squares' sums, which is among the sums too.
    """
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted, strict=True):
        assert (x.sums.dtype, x.counts.dtype) == (torch.float64, torch.int64)
        assert torch.equal(x.counts, y.counts)
        largest = max([abs(s) for s in y.sums.tolist() if math.isfinite(s)], default=0.0)
        torch.testing.assert_close(x.sums, y.sums, rtol=2.0**-19, atol=2.0**-19 * largest, equal_nan=True)


def is_exact(update: Update) -> bool:
    """Returns True if native code has all bits of the reference."""
    return not any(node.target in INEXACT for node in update.graph.graph.nodes)


class Beside(Backend):
    """Native code, compared with the reference in every step; and nothing may be left to that."""

    name = "beside"
    devices = ("cpu",)
    measures = True
    draws = True
    layouts = REFERENCE.layouts

    def __init__(self) -> None:
        self.updates: set[Update] = set()
        self.measured = 0

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        copies = copies_of(launches)
        wanted = REFERENCE.run(copies)
        left = of_reference(NATIVE, launches)
        assert not left, f"left to the reference: {left}"
        found = NATIVE.run(launches)
        for launch, copy in zip(launches, copies, strict=True):
            if is_exact(launch.update):
                assert_same(launch.update, launch.writes, copy.writes)
        if all(is_exact(launch.update) for launch in launches):
            used = [x.finite is None or bool(x.finite) for x in launches if x.update.sums for _ in x.reads]
            assert_same_measures([*compress(found, used)], [*compress(wanted, used)])
            self.updates.update(launch.update for launch in launches)
        self.measured += len(found)
        return found


def of_reference(native: Native, launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """The parameters, by the numbers of launch and parameter, for which a step has no native code."""
    step = lay_out(launches, native.engine.kernels)
    return step.left if step is not None else [(i, j) for i, x in enumerate(launches) for j in range(len(x.reads))]


def check(*launches: Launch, left: int = 0) -> None:
    """Both backends do the same; `left` parameters are left to the reference."""
    copies = copies_of(launches)
    assert len(of_reference(NATIVE, launches)) == left
    found, wanted = NATIVE.run(launches), REFERENCE.run(copies)
    for x, y in zip(launches, copies, strict=True):
        assert_same(x.update, x.writes, y.writes)
    assert_same_measures(found, wanted)
