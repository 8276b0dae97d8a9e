"""The jobs of a step: every update of every parameter, laid out in memory for the driver."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import add, is_, mul
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.passes.backends.native.code import NotEmitted
from collage_neuron.passes.backends.native.kernel import Kernel, slots_of, write_kernel
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.memory import extent, in_one_order, is_plain, share_memory
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.ir.update import Update

LAYOUTS = frozenset({BY_ELEMENT})
"""How words may lie in memory. Updates with others are left to the reference: there is no loop over blocks yet."""


@dataclass(frozen=True)
class Compiled:
    """A kernel with its code."""

    kernel: Kernel
    described: array[int]
    """What the driver reads of it: see `driver.KERNEL`."""
    address: int
    """That of the description."""

    @property
    def lanes(self) -> int:
        """Doubles of a measurement, which are to be added up."""
        return self.kernel.step // 2


class Bound:
    """The kernels of one update, for tensors of different dtypes."""

    def __init__(self, update: Update, machine: Machine) -> None:
        place = {key: i for i, key in enumerate(update.inputs)}
        self._machine = machine
        self.both = [(place[key], j) for j, key in enumerate(update.outputs) if key in place]
        """Places of the keys that are read and written: mostly the same tensor, which is one slot then."""
        self.only_written = [j for j, key in enumerate(update.outputs) if key not in place]
        self._kernels: dict[tuple[bool, tuple[torch.dtype, ...]], Compiled | None] = {}

    def written(self, apart: bool, slots: int) -> list[bool]:
        """Which slots are written; where words lie `apart` from those they replace, these have slots of their own."""
        reads = slots - (len(self.both) * apart + len(self.only_written))
        replaced = set() if apart else {i for i, _ in self.both}
        return [i in replaced or i >= reads for i in range(slots)]

    def kernel(self, update: Update, apart: bool, dtypes: tuple[torch.dtype, ...]) -> Compiled | None:
        """The kernel for slots of these dtypes; None if there is no code for one of them, or for an operation."""
        key = apart, dtypes
        if key not in self._kernels:
            self._kernels[key] = self._compiled(update, apart, dtypes)
        return self._kernels[key]

    def write(self, update: Update, apart: bool, dtypes: Sequence[torch.dtype]) -> Kernel:
        """The text of that kernel; NotEmitted if there is none."""
        count = len(update.inputs)
        reads, more = dtypes[:count], iter(dtypes[count:])
        kept = {} if apart else {j: reads[i] for i, j in self.both}
        writes = [kept[j] if j in kept else next(more) for j in range(len(update.outputs))]
        return write_kernel(update, slots_of(update, reads, writes, apart), self._machine.target.width)

    def _compiled(self, update: Update, apart: bool, dtypes: tuple[torch.dtype, ...]) -> Compiled | None:
        if update.layouts - LAYOUTS:
            return None
        try:
            kernel = self.write(update, apart, dtypes)
        except NotEmitted:
            return None
        words = [n for slot in kernel.slots for n in (slot.dtype.itemsize, int(slot.written is not None))]
        described = array("q", [self._machine.address(kernel), kernel.step, len(kernel.slots), *words])
        return Compiled(kernel, described, described.buffer_info()[0])


class Kernels:
    """The kernels of all updates that are still in use."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        # A `Bound` must not refer to its update, or neither would ever be freed.
        self._bound: WeakKeyDictionary[Update, Bound] = WeakKeyDictionary()

    def of(self, update: Update) -> Bound:
        """Those of an update."""
        bound = self._bound.get(update)
        if bound is None:
            bound = self._bound[update] = Bound(update, self._machine)
        return bound


Place = tuple[int, int]
"""A parameter of a step: the numbers of its launch and, in that, of itself."""


@dataclass
class Group:
    """Parameters with one update, whose tensors are looked at column by column: in Python, nothing is done for each."""

    update: Update
    bound: Bound
    places: list[Place] = field(default_factory=list)
    scalars: list[int] = field(default_factory=list)
    """For each parameter the address of its scalar vector."""
    reads: list[Sequence[Tensor]] = field(default_factory=list)
    writes: list[Sequence[Tensor]] = field(default_factory=list)

    def add(self, number: int, launch: Launch) -> None:
        """Adds the parameters of a launch."""
        self.places += zip(repeat(number), range(len(launch.reads)))
        self.scalars += [launch.vector.data_ptr()] * len(launch.reads)
        self.reads += launch.reads
        self.writes += launch.writes

    def alone(self) -> Iterator[Group]:
        """Each parameter as a group."""
        for place, scalars, reads, writes in zip(self.places, self.scalars, self.reads, self.writes, strict=True):
            yield Group(self.update, self.bound, [place], [scalars], [reads], [writes])

    def is_apart(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
        """Returns True if a word, of all these, lies apart from the one that it replaces."""
        inputs, outputs = len(self.update.inputs), len(self.update.outputs)
        return not all(all(map(is_, reads[i::inputs], writes[j::outputs])) for i, j in self.bound.both)

    def slots(self) -> tuple[bool, list[Tensor]]:
        """The tensors of one parameter after the other in the order of slots; and True if words lie apart."""
        reads, writes = list(chain.from_iterable(self.reads)), list(chain.from_iterable(self.writes))
        apart = self.is_apart(reads, writes)
        if not apart and not self.bound.only_written:
            return False, reads
        pairs = zip(self.reads, self.writes, strict=True)
        if apart:
            return True, [t for old, new in pairs for t in (*old, *new)]
        return False, [t for old, new in pairs for t in (*old, *(new[j] for j in self.bound.only_written))]


@dataclass
class Step:
    """What the driver works through, and what it does not."""

    jobs: array[int] = field(default_factory=lambda: array("q"))
    """The description of each job: see `driver.JOB`."""
    steps: int = 0
    """Steps of all loops."""
    elements: int = 0
    measures: int = 0
    """Vectors of measurements of each thread."""
    measured: dict[Place, int] = field(default_factory=dict)
    """Where those of a parameter begin."""
    changed: list[Sequence[Tensor]] = field(default_factory=list)
    """The tensors that jobs write."""
    left: list[Place] = field(default_factory=list)
    """Parameters that the reference has to update."""
    rows: list[array[int]] = field(default_factory=list)
    """The addresses of tensors, to which the jobs refer."""
    kept: list[object] = field(default_factory=list)
    """What else must live until the step has run."""
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    """For each tensor where its memory begins and ends, and True if it is written."""

    def add(self, group: Group) -> bool:
        """Adds the jobs of a group; False if one of its tensors is not plainly in memory."""
        apart, tensors = group.slots()
        if not _in_memory(tensors):
            return False
        columns = _Columns(tensors, len(tensors) // len(group.places))
        compiled = group.bound.kernel(group.update, apart, tuple(columns.dtypes[: columns.slots]))
        if columns.are_alike and compiled is not None:
            self._note(columns.addresses, columns.sizes, tensors, group, apart)
            self._fill(group, compiled, columns)
        elif len(group.places) > 1:
            return all(self.add(one) for one in group.alone())
        else:
            self._note(columns.addresses, [*map(extent, tensors)], tensors, group, apart)
            self._straighten(group, compiled, tensors, apart)
        return True

    def _note(self, begins: list[int], sizes: list[int], tensors: list[Tensor], group: Group, apart: bool) -> None:
        """Notes the memory of tensors."""
        self.begins += begins
        self.ends += map(add, begins, map(mul, sizes, map(Tensor.element_size, tensors)))
        slots = len(tensors) // len(group.places)
        self.written += group.bound.written(apart, slots) * len(group.places)

    def _fill(self, group: Group, compiled: Compiled, columns: _Columns) -> None:
        """Adds the jobs of a group whose parameters have one kernel."""
        rows = array("q", columns.addresses)
        self.rows.append(rows)
        step, count = compiled.kernel.step, len(group.places)
        sizes = columns.sizes[:: columns.slots]
        steps = [-(-size // step) for size in sizes]
        before = [*accumulate(steps, initial=self.steps)]
        first, width = rows.buffer_info()[0], 8 * columns.slots
        measures = len(group.update.sums) + len(group.update.counts)
        vectors = range(self.measures, self.measures + measures * count, measures) if measures else [0] * count
        self.jobs.extend(
            chain.from_iterable(
                zip(
                    repeat(compiled.address), range(first, first + width * count, width), group.scalars, sizes, before,
                    steps, [vector * compiled.lanes for vector in vectors],
                )
            )
        )  # fmt: skip
        self.steps = before[-1]
        self.elements += sum(sizes)
        self.changed += group.writes
        if measures:
            self.measured.update(zip(group.places, vectors, strict=True))
            self.measures += measures * count

    def _straighten(self, group: Group, compiled: Compiled | None, tensors: list[Tensor], apart: bool) -> None:
        """Adds a parameter whose tensors are not all contiguous, if each element lies at the same place of all.

        What is only read may be copied for that. All else is left to the reference.
        """
        written = group.bound.written(apart, len(tensors))
        if compiled is None or len({*map(Tensor.numel, tensors)}) > 1:
            self.left += group.places
        elif not group.update.draws and in_one_order(tensors):
            self._fill(group, compiled, _Columns(tensors, len(tensors)))
        elif all(t.is_contiguous() for t, is_written in zip(tensors, written, strict=True) if is_written):
            copies = [t.contiguous() for t in tensors]
            self.kept.append(copies)
            self._fill(group, compiled, _Columns(copies, len(copies)))
        else:
            self.left += group.places

    def shares_memory(self) -> bool:
        """Returns True if something that is written shares memory with something else."""
        return share_memory(self.begins, self.ends, self.written)

    def measures_of(self, launches: Sequence[Launch], totals: Tensor) -> dict[Place, Measure]:
        """The measurements of jobs, from what each lane of each thread added up."""
        sums = totals.sum((0, 2))
        counts, found = sums.to(torch.int64), {}
        for place, at in self.measured.items():
            update = launches[place[0]].update
            middle, end = at + len(update.sums), at + len(update.sums) + len(update.counts)
            found[place] = Measure(sums[at:middle], counts[middle:end])
        return found


class _Columns:
    """Numbers of the tensors of a group, `slots` for each parameter."""

    def __init__(self, tensors: Sequence[Tensor], slots: int) -> None:
        self.slots = slots
        self.addresses = [*map(Tensor.data_ptr, tensors)]
        self.sizes = [*map(Tensor.numel, tensors)]
        self.dtypes = [t.dtype for t in tensors]
        self._are_contiguous = all(map(Tensor.is_contiguous, tensors))

    @property
    def are_alike(self) -> bool:
        """Returns True if all are contiguous, those of a parameter of one size, and those in a slot of one dtype."""
        n, first = self.slots, self.sizes[:: self.slots]
        return self._are_contiguous and all(
            self.sizes[i::n] == first and len({*self.dtypes[i::n]}) == 1 for i in range(n if first else 0)
        )


def _in_memory(tensors: Sequence[Tensor]) -> bool:
    """Returns True if the numbers of all are those in the memory of the CPU at their addresses."""
    return (
        all(map(is_plain, {*map(type, tensors)}))
        and all(t.is_cpu for t in tensors)
        and not any(map(Tensor.is_neg, tensors))
    )
