"""The jobs of a step: every update of every parameter, laid out in memory for the driver.

Or the layout of an earlier step, where only addresses and numbers differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby, pairwise, repeat
from operator import add, attrgetter, is_, mul

import torch
from torch import Tensor

from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.kernel import Bound, Compiled, Kernels
from collage_neuron.passes.backends.native.memory import each_lies_alone, extent, in_memory, in_one_order, share_memory
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.ir.update import Update


class PointerArrays:
    """Numbers of the tensors of a group, in the order of slots, one parameter after another."""

    def __init__(self, tensors: Sequence[Tensor], shared: Sequence[bool], block: int) -> None:
        """`shared` has for each slot True if it has one word for each block of `block` elements of a row."""
        self.slots = len(shared)
        # `map` over a method of C++: no frame of Python's for each tensor.
        self.addresses = [*map(Tensor.data_ptr, tensors)]
        self.sizes = [*map(Tensor.numel, tensors)]
        self.dtypes = [t.dtype for t in tensors]
        self._shared = shared
        self._are_contiguous = all(map(Tensor.is_contiguous, tensors))
        first = shared.index(False)
        self.elements = self.sizes[first :: self.slots]
        """Elements of each parameter."""
        self.lengths, self.words = self.elements, self.elements
        """The lengths of the rows of each parameter, where blocks end; its blocks."""
        if block:
            shapes = [t.shape for t in tensors[first :: self.slots]]
            rows = [shape[-1] if shape else 1 for shape in shapes]
            self.words = [-(-n // block) * (size // max(n, 1)) for n, size in zip(rows, self.elements, strict=True)]
            # Rows of whole blocks are like one row.
            self.lengths = [n if n % block else size for n, size in zip(rows, self.elements, strict=True)]

    @property
    def are_alike(self) -> bool:
        """Returns True if all are contiguous, of one size, and those in each slot of one dtype."""
        return (
            self._are_contiguous
            and self.are_of_one_size
            and all(len({*self.dtypes[i :: self.slots]}) == 1 for i in range(self.slots if self.elements else 0))
        )

    @property
    def are_of_one_size(self) -> bool:
        """Returns True if the tensors of a parameter fit one another: a word for each element, or for each block."""
        return all(
            self.sizes[i :: self.slots] == (self.words if shared else self.elements)
            for i, shared in enumerate(self._shared)
        )


Place = tuple[int, int]
"""A parameter of a step: the numbers of its launch and, in that, of itself."""

Taken = list[tuple[Place, Launch]]
"""Launches of a step that are not skipped, or parts of these, with the places of their first parameters."""


class Group:
    """Parameters with one update, whose tensors are looked at column by column: in Python, nothing is done for each."""

    def __init__(self, update: Update, bound: Bound, launches: Taken) -> None:
        """The parameters of `launches`."""
        self.update, self.bound = update, bound
        # As elsewhere here `map` over what is not written in Python: a step does all this anew.
        self._firsts, self.launches = zip(*launches, strict=True)
        self.reads = [*chain.from_iterable(map(attrgetter("reads"), self.launches))]
        self.writes = [*chain.from_iterable(map(attrgetter("writes"), self.launches))]

    @property
    def places(self) -> list[Place]:
        """The parameters."""
        pairs = zip(self._firsts, self.launches, strict=True)
        return [(number, i) for (number, first), x in pairs for i in range(first, first + len(x.reads))]

    @property
    def scalars(self) -> list[int]:
        """For each parameter the address of its scalar vector."""
        return [*chain.from_iterable(map(_vectors, self.launches))]

    def alone(self) -> Iterator[Group]:
        """Each parameter as a group."""
        for (number, first), launch in zip(self._firsts, self.launches, strict=True):
            for i in range(len(launch.reads)):
                yield Group(self.update, self.bound, [((number, first + i), launch.part([i]))])

    def is_apart(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
        """Returns True if a word, of all these, lies apart from the one that it replaces."""
        inputs, outputs = len(self.update.inputs), len(self.update.outputs)
        return not all(all(map(is_, reads[i::inputs], writes[j::outputs])) for i, j in self.bound.both)

    def arrays(self, tensors: Sequence[Tensor], apart: bool) -> PointerArrays:
        """Numbers of its tensors, which are in the order of slots."""
        return PointerArrays(tensors, self.bound.shared(apart), self.bound.block)

    def slots(self) -> tuple[bool, list[Tensor]]:
        """The tensors of one parameter after the other in the order of slots; and True if words lie apart."""
        reads = list(chain.from_iterable(self.reads))
        in_place = all(map(attrgetter("in_place"), self.launches))
        apart = not in_place and self.is_apart(reads, list(chain.from_iterable(self.writes)))
        if not apart and not self.bound.only_written:
            return False, reads
        pairs = zip(self.reads, self.writes, strict=True)
        if apart or not self.bound.both:  # all have slots, without a look at each
            return apart, list(chain.from_iterable(chain.from_iterable(pairs)))
        return False, [t for old, new in pairs for t in (*old, *(new[j] for j in self.bound.only_written))]


def _vectors(launch: Launch) -> Iterable[int]:
    """For each parameter the address of its numbers: all have one vector, or each a row."""
    first, vector, count = launch.vector.data_ptr(), launch.vector, len(launch.reads)
    # A row that is expanded has no stride.
    width = vector.stride(0) * vector.element_size() if vector.dim() > 1 else 0
    return range(first, first + width * count, width) if width else repeat(first, count)


@dataclass
class Step:
    """What the driver works through, and what it does not."""

    jobs: array[int] = field(default_factory=lambda: array("q"))
    """The description of each job: see `driver.JOB`."""
    work: int = 0
    """That of all jobs, in units of what a step of a loop over independent elements does."""
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
    bounds: list[Bound] = field(default_factory=list)
    """Those of the jobs, which have addresses of their kernels only."""
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tensors with the copies that jobs write in their place."""
    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    """For each tensor where its memory begins and ends, and True if it is written."""

    def add(self, group: Group) -> bool:
        """Adds the jobs of a group; False if one of its tensors is not plainly in memory."""
        apart, tensors = group.slots()
        if not in_memory(tensors):
            return False
        arrays = group.arrays(tensors, apart)
        if arrays.addresses.count(0) != arrays.sizes.count(0):  # a ZeroTensor of autograd, or memory that was freed
            return False
        compiled = group.bound.kernel(group.update, apart, tuple(arrays.dtypes[: arrays.slots]))
        if arrays.are_alike and compiled is not None:
            self._note(arrays.addresses, arrays.sizes, tensors, group, apart)
            self._fill(group, compiled, arrays)
        # Not all alike: one by one, so that only an odd parameter is copied, or left to the reference.
        elif len(group.places) > 1:
            return all(self.add(one) for one in group.alone())
        else:
            self._note(arrays.addresses, [*map(extent, tensors)], tensors, group, apart)
            self._straighten(group, compiled, tensors, apart)
        return True

    def _note(self, begins: list[int], sizes: list[int], tensors: list[Tensor], group: Group, apart: bool) -> None:
        """Notes the memory of tensors."""
        self.begins += begins
        self.ends += map(add, begins, map(mul, sizes, map(Tensor.element_size, tensors)))
        self.written += group.bound.written(apart) * len(group.places)

    def _fill(self, group: Group, compiled: Compiled, arrays: PointerArrays) -> None:
        """Adds the jobs of a group whose parameters have one kernel."""
        rows = array("q", arrays.addresses)
        self.rows.append(rows)
        self.bounds.append(group.bound)
        count, step = len(group.places), compiled.kernel.step
        # With blocks, these are the steps already; without, a parameter is one row.
        steps = arrays.words if group.bound.block else [-(-size // step) for size in arrays.elements]
        first, width = rows.buffer_info()[0], 8 * arrays.slots
        places = range(first, first + width * count, width)
        measures = len(group.update.sums) + len(group.update.counts)
        vectors = range(self.measures, self.measures + measures * count, measures) if measures else [0] * count
        self.add_jobs(compiled, places, group.scalars, arrays.lengths, steps, vectors)
        self.elements += sum(arrays.elements)
        self.changed += group.writes
        if measures:
            self.measured.update(zip(group.places, vectors, strict=True))
            self.measures += measures * count

    def add_jobs(
        self, compiled: Compiled, rows: Iterable[int], scalars: Iterable[int], lengths: Iterable[int],
        steps: Iterable[int], vectors: Iterable[int] = repeat(0),
    ) -> None:  # fmt: skip
        """Adds jobs of a kernel: see `driver.JOB`. `vectors` are the numbers of the first measurement of each."""
        work = [compiled.unit * n for n in steps]
        before = accumulate(work, initial=self.work)
        doubles = (compiled.kernel.width * vector for vector in vectors)
        numbers = zip(repeat(compiled.address), rows, scalars, lengths, before, work, doubles, strict=False)
        self.jobs.extend(chain.from_iterable(numbers))
        self.work += sum(work)

    def _straighten(self, group: Group, compiled: Compiled | None, tensors: list[Tensor], apart: bool) -> None:
        """Adds a parameter whose tensors are not all contiguous: as it lies in memory, or as copies.

        Left to the reference is what has no kernel, or is written and has elements that share memory.
        """
        # Random bits and blocks depend on an element's number in row-major order, not on its place in such memory.
        lies_well = not group.update.draws and not group.bound.block and in_one_order(tensors)
        straight = tensors if lies_well else [t.contiguous() for t in tensors]
        written = group.bound.written(apart)
        back = [(t, copy) for t, copy, is_written in zip(tensors, straight, written, strict=True)
                if is_written and copy is not t]  # fmt: skip
        arrays = group.arrays(straight, apart)
        if compiled is None or not arrays.are_of_one_size or not all(each_lies_alone(t) for t, _ in back):
            self.left += group.places
            return
        self.kept.append(straight)
        self.back += back
        self._fill(group, compiled, arrays)

    def put_back(self) -> None:
        """Copies what jobs have written to where it belongs."""
        for t, written in self.back:
            t.copy_(written)

    def shares_memory(self) -> bool:
        """Returns True if something that is written shares memory with something else."""
        return share_memory(self.begins, self.ends, self.written)

    def measures_of(self, launches: Sequence[Launch], totals: Tensor) -> dict[Place, Measure]:
        """The measurements of jobs, from what each lane of each thread added up."""
        sums = totals.sum((0, 2))
        # Counts have come as doubles, which hold whole numbers exactly up to 2**53.
        counts, found = sums.to(torch.int64), {}
        for place, at in self.measured.items():
            update = launches[place[0]].update
            middle, end = at + len(update.sums), at + len(update.sums) + len(update.counts)
            found[place] = Measure(sums[at:middle], counts[middle:end])
        return found


@dataclass(frozen=True, eq=False)
class Laid:
    """A step as it was laid out, for later ones whose tensors differ in nothing but values and addresses."""

    places: list[Place]
    firsts: list[int]
    """Which is the first launch of each group, and how many there are."""
    others: list[object]
    """`Launch.kept` of the launches after the first, in which this is kept."""
    apart: list[bool]
    """For each group, whether words lie apart."""
    addresses: list[int]
    bytes: list[int]
    """For each tensor the length of its memory."""
    step: Step
    """Without tensors."""

    def again(self, taken: Taken) -> Step | None:
        """The step for these launches; None if they are of other tensors, or share memory now."""
        places, launches = zip(*taken, strict=True)
        if [*places] != self.places or not all(map(is_, self.others, map(attrgetter("kept"), launches[1:]))):
            return None
        # Those of one group have one update, as they had: what is kept is of this update.
        parts = [taken[first:end] for first, end in pairwise(self.firsts)]
        groups = [Group(of[0][1].update, bound, of) for bound, of in zip(self.step.bounds, parts, strict=True)]
        slots = [group.slots() for group in groups]
        if [apart for apart, _ in slots] != self.apart:
            return None
        addresses = [*map(Tensor.data_ptr, chain.from_iterable(tensors for _, tensors in slots))]
        if addresses != self.addresses and not self._move(addresses):
            return None
        # The vectors of numbers are new in each step; all else of a job is as it was.
        self.step.jobs[JOB.index("scalars") :: len(JOB)] = array(
            "q", chain.from_iterable(map(attrgetter("scalars"), groups))
        )
        self.step.changed = [row for group in groups for row in group.writes]
        return self.step

    def _move(self, addresses: list[int]) -> bool:
        """Replaces the addresses, to which the jobs refer; False, and nothing is replaced, if memory is shared.

        Or if a tensor that is not empty has none.
        """
        if addresses.count(0) != self.bytes.count(0):  # only empty tensors have none
            return False
        if share_memory(addresses, list(map(add, addresses, self.bytes)), self.step.written):
            return False
        self.addresses[:] = addresses
        first = 0
        for rows in self.step.rows:
            rows[:] = array("q", addresses[first : first + len(rows)])
            first += len(rows)
        return True


def lay_out(launches: Sequence[Launch], kernels: Kernels) -> Step | None:
    """The step, without launches to be skipped.

    None if the reference has to take it all: parameters share memory, so that their order matters, or a tensor is not
    plainly in memory.
    """
    taken = [((i, 0), x) for i, x in enumerate(launches) if x.reads and (x.finite is None or bool(x.finite))]
    kept = taken[0][1].kept if taken else None
    laid: Laid | None = None if kept is None else kept.get(kernels)
    again = None if laid is None else laid.again(taken)
    if again is not None:
        return again
    alike = (list(own) for _, own in groupby(taken, lambda x: id(x[1].update)))
    groups = [Group((update := own[0][1].update), kernels.of(update), own) for own in alike]
    step = Step()
    if not all(step.add(group) for group in groups) or step.shares_memory():
        return None
    are_whole = len(step.rows) == len(groups) and not step.left and not step.kept  # no parameter was taken alone
    if kept is not None and are_whole and all(launch.kept is not None for _, launch in taken):
        kept[kernels] = _laid(taken, groups, step)
    return step


def _laid(taken: Taken, groups: Sequence[Group], step: Step) -> Laid:
    others: list[object] = [launch.kept for _, launch in taken[1:]]
    apart = [group.slots()[0] for group in groups]
    lengths = [end - begin for begin, end in zip(step.begins, step.ends, strict=True)]
    without = replace(step, changed=[])
    firsts = [*accumulate((len(group.launches) for group in groups), initial=0)]
    return Laid([place for place, _ in taken], firsts, others, apart, list(step.begins), lengths, without)
