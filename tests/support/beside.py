"""A backend that runs every step natively, and on copies of all tensors on the reference, and compares all bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from natively import assert_same, assert_same_measures, copies_of

from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.backend import Native
from collage_neuron.passes.backends.native.job_cache import lay_out
from collage_neuron.passes.backends.native.rules import INEXACT
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.ir.update import Update


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
