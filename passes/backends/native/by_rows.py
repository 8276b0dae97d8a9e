"""Runs updates with reductions over rows or columns, one parameter after another, as the reference backend does.

What there is no code for is left to that: short rows, parameters that are not contiguous, random bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collage_neuron.passes.backends.by_rows import Values, find, results_of
from collage_neuron.passes.backends.native.jobs import Step
from collage_neuron.passes.backends.native.rows import (
    RowKernels,
    Rows,
    disjoint,
    stored,
    sums_of_columns,
    sums_of_rows,
)
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.reference_rows import ReferenceRows
from collage_neuron.passes.backends.staged import store_small
from collage_neuron.passes.ir.update import Update

Run = Callable[[Step], Tensor]
"""Runs the jobs of a step; returns the measurements."""


def run_by_rows(launch: Launch, kernels: RowKernels, run: Run) -> list[Measure]:
    """Runs a launch; its measurements, of each parameter, if the update has any."""
    if launch.finite is not None and not bool(launch.finite):
        return [_nothing(launch)] * len(launch.reads) if launch.update.sums else []
    measured = []
    for i, (reads, writes) in enumerate(zip(launch.reads, launch.writes, strict=True)):
        one = launch._replace(reads=[reads], writes=[writes], small=launch.small[i : i + 1], kept=None)
        measured += _One(one, kernels, run).run()
    return measured


class _One:
    """One parameter."""

    def __init__(self, launch: Launch, kernels: RowKernels, run: Run) -> None:
        self.launch, self.kernels, self.run_step, self.update = launch, kernels, run, launch.update
        (self.reads,), (self.writes,) = launch.reads, launch.writes
        lowered = REFERENCE.lowered(self.update)
        assert isinstance(lowered, ReferenceRows)
        self.reference = lowered

    def run(self) -> list[Measure]:
        """Runs the update; its measurements, if it has any."""
        if not self.kernels.suit(self.reads):
            return REFERENCE.run_one(self.launch)
        reads = [t.contiguous() for t in self.reads]
        values, found = find(self.launch, self._sums)
        written = {i: t for i, t in enumerate(self.reads) if any(t is x for x in self.writes)}
        more = [t for t in self.writes if not any(t is x for x in self.reads)]
        totals = self._stored(reads, written, more, values)
        if totals is None:
            return REFERENCE.run_one(self.launch)
        store_small(self.launch, found)
        return [self._measure(totals)] if self.update.sums else []

    def _sums(self, part: Update, components: Sequence[Tensor], values: Values) -> Sequence[Tensor]:
        results, sums = results_of(part.stages[0]), dict[int, Tensor]()
        for by_columns in {r.by_columns for r in results}:
            found = self.kernels.variant(part, by_columns)
            read = Rows.of(found, [t.contiguous() for t in components], self.launch.vector, values)
            add = sums_of_columns if by_columns else sums_of_rows
            own = add(self.kernels, self.run_step, read, found)
            if own is None:
                return self.reference.sums[part](components, self.launch.vector, values)
            sums |= dict(zip(found.results, own, strict=True))
        return [sums[i] for i in range(len(results))]

    def _stored(
        self, reads: Sequence[Tensor], written: dict[int, Tensor], more: Sequence[Tensor], values: Values
    ) -> Tensor | None:
        """Stores the new components, by machine code; None, and nothing is stored, if there is none."""
        place = {key: i for i, key in enumerate(self.update.inputs)}
        in_place = all(
            self.reads[place[key]] is t for key, t in zip(self.update.outputs, self.writes, strict=True) if key in place
        )
        whole = all(t.is_contiguous() and t.shape == reads[0].shape for t in self.writes)
        if self.update.draws or not in_place or not whole or not disjoint(reads, written, more):
            return None
        found = self.kernels.variant(self.update.parts[-1])
        torch.autograd.graph.increment_version([*self.writes])
        return stored(self.kernels, self.run_step, Rows.of(found, reads, self.launch.vector, values), found, more)

    def _measure(self, totals: Tensor) -> Measure:
        sums, middle = totals.sum((0, 2)), len(self.update.sums)
        return Measure(sums[:middle], sums[middle:].to(torch.int64))


def _nothing(launch: Launch) -> Measure:
    return Measure(torch.zeros(len(launch.update.sums)), torch.zeros(len(launch.update.counts), dtype=torch.int64))
