"""Updates with reductions over rows or columns: parameters of one shape are updated together.

What there is no code for is left to the reference backend: short rows, parameters that are not contiguous, random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_neuron.passes.backends.by_rows import Values, find
from collage_neuron.passes.backends.native.code import NotEmitted
from collage_neuron.passes.backends.native.jobs import Step
from collage_neuron.passes.backends.native.rows import RowKernels, Rows, Run, disjoint, stored, summed
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.staged import store_small
from collage_neuron.passes.ir.update import Update


def run_by_rows(launch: Launch, kernels: RowKernels, run: Run) -> list[Measure]:
    """Runs a launch; its measurements, of each parameter, if the update has any."""
    if launch.finite is not None and not bool(launch.finite):
        return [_nothing(launch)] * len(launch.reads) if launch.update.sums else []
    measured = dict[int, Measure]()
    for numbers in _together(launch):
        own = _Alike(_of(launch, numbers), kernels, run).run()
        measured |= dict(zip(numbers, own, strict=True)) if launch.update.sums else {}
    return [measured[i] for i in sorted(measured)]


def _of(launch: Launch, numbers: Sequence[int]) -> Launch:
    """The launch of some of its parameters."""
    reads, writes = ([given[i] for i in numbers] for given in (launch.reads, launch.writes))
    small = [launch.small[i] for i in numbers] if launch.small else ()
    return launch._replace(reads=reads, writes=writes, small=small, kept=None)


def _together(launch: Launch) -> list[list[int]]:
    """The numbers of parameters of one shape and of equal dtypes; each alone, in order, if any share memory."""
    read_and_written = list(zip(launch.reads, launch.writes, strict=True))
    tensors = [t for reads, writes in read_and_written for t in (*reads, *_more(reads, writes))]
    written = [
        flag
        for reads, writes in read_and_written
        for flag in (*_are_written(reads, writes), *(True for _ in _more(reads, writes)))
    ]
    if not disjoint(tensors, written):
        return [[i] for i in range(len(launch.reads))]
    groups: dict[object, list[int]] = {}
    for i, (reads, writes) in enumerate(read_and_written):
        key = reads[0].shape, *((type(t), t.dtype, t.is_contiguous()) for t in (*reads, *writes))
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def _are_written(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[bool]:
    return [any(t is x for x in writes) for t in reads]


def _more(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[Tensor]:
    """What is written and not read."""
    return [t for t in writes if not any(t is x for x in reads)]


class _Alike:
    """Parameters of one shape."""

    def __init__(self, launch: Launch, kernels: RowKernels, run: Run) -> None:
        self.launch, self.kernels, self.run_step, self.update = launch, kernels, run, launch.update
        self.more = [_more(*pair) for pair in zip(launch.reads, launch.writes, strict=True)]

    def run(self) -> list[Measure]:
        """Runs the update; its measurements, if it has any."""
        if not self._is_for_machine_code():
            return self._on_reference()
        reads = [[t.contiguous() for t in own] for own in self.launch.reads]
        try:
            values, found = find(self.launch._replace(reads=reads), self._sums)
            totals = self._stored(reads, values)
        except NotEmitted:  # nothing has been written
            return self._on_reference()
        store_small(self.launch, found)
        return self._measures(totals) if self.update.sums else []

    def _on_reference(self) -> list[Measure]:
        ones = (_of(self.launch, [i]) for i in range(len(self.launch.reads)))
        return [measure for one in ones for measure in REFERENCE.run_one(one)]

    def _is_for_machine_code(self) -> bool:
        """Returns True if rows are long enough, and what is written is contiguous, and shares no memory."""
        if self.update.draws or not all(map(self.kernels.suit, self.launch.reads)):
            return False
        place = {key: i for i, key in enumerate(self.update.inputs)}
        kept = [(place[key], j) for j, key in enumerate(self.update.outputs) if key in place]
        for reads, writes, more in zip(self.launch.reads, self.launch.writes, self.more, strict=True):
            whole = all(t.is_contiguous() and t.shape == reads[0].shape for t in writes)
            tensors, written = [*reads, *more], [*_are_written(reads, writes), *(True for _ in more)]
            if not whole or not all(reads[i] is writes[j] for i, j in kept) or not disjoint(tensors, written):
                return False
        return True

    def _sums(self, part: Update, components: Sequence[Sequence[Tensor]], values: Values) -> Sequence[Tensor]:
        vector = self.launch.vector
        sums = summed(self.kernels, self.run_step, part, lambda found: Rows.of(found, components, vector, values))
        return sums if len(components) > 1 else [x[0] for x in sums]

    def _stored(self, reads: Sequence[Sequence[Tensor]], values: Values) -> Tensor:
        """Stores the new components, by machine code."""
        found = self.kernels.variant(self.update.parts[-1])
        rows = Rows.of(found, reads, self.launch.vector, values)
        return stored(self.kernels, self._counted, rows, found, self.more)

    def _counted(self, step: Step) -> Tensor:
        torch.autograd.graph.increment_version([t for own in self.launch.writes for t in own])
        return self.run_step(step)

    def _measures(self, totals: Tensor) -> list[Measure]:
        sums, middle = totals.sum((0, 2)).view(len(self.launch.reads), -1), len(self.update.sums)
        return [Measure(own[:middle], own[middle:].to(torch.int64)) for own in sums]


def _nothing(launch: Launch) -> Measure:
    return Measure(
        torch.zeros(len(launch.update.sums), dtype=torch.float32, device="cpu"),
        torch.zeros(len(launch.update.counts), dtype=torch.int64, device="cpu"),
    )
