"""Updates with reductions over rows or columns: each row of a parameter is a job, whose scalars have its values.

Values of columns are tensors beside the components. Parameters of one shape are updated together. A reduction stage
takes one pass over memory (`column_sums`), or one for its sums over columns and one for those over rows where rows
are no whole steps of a loop. What there is no code for is left to the reference backend: short rows, parameters that
are not contiguous, random bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.matrix_sums import COLUMN, DOWN, NUMBER, view_of
from collage_neuron.numerics.tensor_sums import RUN
from collage_neuron.passes.backends.by_rows import Values, find, results_of
from collage_neuron.passes.backends.native.column_sums import write_tiles
from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.jobs import Bound, Compiled, Step
from collage_neuron.passes.backends.native.llvm_builder import NotEmitted
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.memory import is_plain, share_memory
from collage_neuron.passes.backends.native.pairwise_sum import write_runs
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.staged import store_small
from collage_neuron.passes.ir.update import Update

Dtypes = tuple[torch.dtype, ...]

ROWS, COLUMNS, BOTH = "rows", "columns", "rows and columns"
"""What a variant of a reduction stage adds up; all that is not added down columns is added along rows first."""


class Variant(NamedTuple):
    """A part of an update as a kernel sees it: values of columns are components, those of rows are scalars."""

    update: Update
    columns: tuple[str, ...]
    """The names of the values of columns, which are its last inputs."""
    numbers: tuple[str, ...]
    """Those of all others."""
    results: tuple[int, ...]
    """Of a reduction stage, the numbers of the results that it computes."""


def variant(part: Update, adds: str = ROWS) -> Variant:
    """That of the last stage; of a reduction stage, that of some sums."""
    (stage,) = part.stages
    columns = tuple(name for name in stage.numbers if part.extents.get(name, NUMBER) == COLUMN)
    numbers = tuple(name for name in stage.numbers if name not in columns)
    inputs = [n for n in stage.body.nodes if n.op == "placeholder"]
    named = dict(zip(reversed(stage.numbers), reversed(inputs), strict=False))
    count, body, made = len(stage.inputs), fx.Graph(), dict[fx.Node, fx.Node]()
    others = [n for n in inputs[count:] if n not in named.values()]
    for node in (*inputs[:count], *(named[x] for x in columns), *others, *(named[x] for x in numbers)):
        made[node] = body.placeholder(str(node.target))
    found: Any = body.graph_copy(stage.body, made)
    wanted = {ROWS: (False,), COLUMNS: (True,), BOTH: (False, True)}[adds]
    results = tuple(i for i, r in enumerate(results_of(stage) if stage.reduced else ()) if r.by_columns in wanted)
    body.output(tuple(found[i] for i in results) if stage.reduced else found)
    body.eliminate_dead_code()
    keys = (*stage.inputs, *columns)
    reduced = tuple(stage.reduced[i] for i in results)
    own = replace(stage, body=body, inputs=keys, numbers=numbers, reduced=reduced)
    return Variant(replace(part, stages=(own,), inputs=keys), columns, numbers, results)


class RowKernels:
    """The kernels of all such updates that are still in use."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._variants: WeakKeyDictionary[Update, dict[str, Variant]] = WeakKeyDictionary()
        self._compiled: WeakKeyDictionary[Update, dict[tuple[Dtypes, str], Compiled]] = WeakKeyDictionary()

    def variant(self, part: Update, adds: str = ROWS) -> Variant:
        """`variant`, remembered."""
        known = self._variants.setdefault(part, {})
        if adds not in known:
            known[adds] = variant(part, adds)
        return known[adds]

    def of(self, found: Variant, dtypes: Dtypes, adds: str = ROWS) -> Compiled:
        """The kernel of a variant for tensors of these dtypes; NotEmitted if there is no code for it."""
        kernels = self._compiled.setdefault(found.update, {})
        if (dtypes, adds) not in kernels:
            kernels[dtypes, adds] = self._made(found, dtypes, adds)
        return kernels[dtypes, adds]

    def _made(self, found: Variant, dtypes: Dtypes, adds: str) -> Compiled:
        update, width = found.update, self.machine.target.width
        if not update.stages[0].reduced:
            kernel = Bound(update, self.machine).write(update, False, dtypes)
        elif adds == ROWS:
            kernel = write_runs(update, dtypes, width)
        else:
            kernel = write_tiles(update, dtypes, len(found.columns), width)
        return Compiled.of(kernel, self.machine)

    def suit(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if rows of these tensors are long enough, and lie in memory one after another."""
        return (
            all(is_plain(type(t)) and t.is_cpu and not t.is_neg() and t.data_ptr() for t in tensors)
            and all(t.shape == tensors[0].shape for t in tensors)
            and tensors[0].shape[-1] >= 2 * self.machine.target.width
        )


class View(NamedTuple):
    """Parameters of one shape: how many, and each one's matrices, rows and columns."""

    params: int
    matrices: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Of each parameter."""
        return self.matrices * self.rows * self.columns


class Outs(NamedTuple):
    """Tensors that are written beside the components, of each parameter one, with the places of jobs in each."""

    addresses: Tensor
    """Where each begins: [parameters, tensors]."""
    offsets: Sequence[Tensor]
    """Bytes to what the jobs of a parameter write: for each tensor [jobs]."""

    @classmethod
    def of_one(cls, tensors: Sequence[Tensor], offsets: Tensor) -> Outs:
        """Those of tensors whose first dimension is the parameters."""
        begins = [[t.data_ptr() + i * t.stride(0) * t.element_size() for t in tensors] for i in range(len(tensors[0]))]
        return cls(torch.tensor(begins, dtype=torch.int64, device="cpu"), [offsets] * len(tensors))


class Rows(NamedTuple):
    """Parameters of one shape, and what a variant of their update reads."""

    view: View
    components: Sequence[Sequence[Tensor]]
    """For each parameter: contiguous."""
    columns: Sequence[Tensor]
    scalars: Tensor
    """The scalars of each row."""

    @classmethod
    def of(cls, found: Variant, components: Sequence[Sequence[Tensor]], scalars: Tensor, values: Values) -> Rows:
        """What the variant reads."""
        count, matrices, rows, columns = view = View(len(components), *view_of(components[0][0].shape))
        of_columns = [values[name].expand(count, matrices, 1, columns).contiguous() for name in found.columns]
        each = [values[name].expand(count, matrices, rows, 1).reshape(-1, 1) for name in found.numbers]
        of_rows = scalars.expand(count, -1).repeat_interleave(matrices * rows, 0)
        own = torch.cat([of_rows, *each], dim=1)
        return cls(view, components, of_columns, own)

    @property
    def dtypes(self) -> Dtypes:
        """Those of all tensors that a kernel reads."""
        return tuple(t.dtype for t in (*self.components[0], *self.columns))

    def addresses(self, first: Tensor, outs: Outs, more: Sequence[Tensor] = ()) -> Tensor:
        """For each parameter and job the addresses of its tensors: at the element `first` of each, and in others.

        `more` are further numbers that a kernel finds behind them, for each job of a parameter.
        """
        row, column = first // self.view.columns, first % self.view.columns
        at_columns = (row // self.view.rows * self.view.columns + column) * 4
        begins = _addresses(self.components)
        of_columns = [t.data_ptr() + _count(self.view.params) * (4 * t[0].numel()) for t in self.columns]
        places = [begins, *(x[:, None] for x in of_columns), outs.addresses]
        offsets = [first * t.element_size() for t in self.components[0]]
        offsets += [at_columns] * len(self.columns) + [*outs.offsets]
        known = torch.cat(places, dim=1)[:, None, :] + torch.stack(offsets, dim=1) if offsets else None
        numbers = [torch.stack([*more], dim=1).expand(self.view.params, -1, -1)] if more else []
        return torch.cat([*([] if known is None else [known]), *numbers], dim=2).contiguous()

    def step(self, compiled: Compiled, table: Tensor, rows: Tensor, lengths: Tensor, measures: int = 0) -> Step:
        """The work of jobs that begin in these rows of each parameter, with these addresses, on rows of these lengths.

        `measures` are those of each parameter.
        """
        count, jobs, width = table.shape
        of_one, scalars = self.view.matrices * self.view.rows, 4 * self.scalars.shape[1]
        steps = (compiled.unit * -(lengths // -compiled.kernel.step)).repeat(count)
        found = torch.empty(count, jobs, len(JOB), dtype=torch.int64, device="cpu")
        every = _count(count)[:, None]
        found[..., 0] = compiled.address
        found[..., 1] = (table.data_ptr() + 8 * width * _count(count * jobs)).view(count, jobs)
        found[..., 2] = self.scalars.data_ptr() + scalars * (every * of_one + rows)
        found[..., 3] = lengths
        found[..., 4] = (steps.cumsum(0) - steps).view(count, jobs)
        found[..., 5] = steps.view(count, jobs)
        found[..., 6] = every * (measures * compiled.lanes)
        described = array("q", ctypes.string_at(found.data_ptr(), found.nbytes))
        elements = count * self.view.elements
        step = Step(jobs=described, work=int(steps.sum()), elements=elements, measures=measures * count)
        step.kept.append((self, table))
        return step


def _count(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device="cpu")


def _addresses(tensors: Sequence[Sequence[Tensor]]) -> Tensor:
    begins = [[t.data_ptr() for t in own] for own in tensors]
    return torch.tensor(begins, dtype=torch.int64, device="cpu")


Run = Callable[[Step], Tensor]
"""Runs the jobs of a step; returns the measurements."""


def _sums_of_rows(kernels: RowKernels, run: Run, read: Rows, found: Variant) -> list[Tensor]:
    """The sums of runs of each row, for the results of a variant."""
    compiled = kernels.of(found, read.dtypes)
    sums, every = [_room(read.view, False) for _ in found.results], _count(read.view.matrices * read.view.rows)
    table = read.addresses(every * read.view.columns, Outs.of_one(sums, every * (8 * sums[0].shape[-1])))
    run(read.step(compiled, table, every, torch.full_like(every, read.view.columns)))
    return sums


def _room(view: View, by_columns: bool) -> Tensor:
    """A tensor for the sums of runs of 64 rows, or else for those of runs of each row."""
    runs = (-(-view.rows // DOWN), view.columns) if by_columns else (view.rows, -(-view.columns // RUN))
    return torch.empty(view.params, view.matrices, *runs, dtype=torch.float64, device="cpu")


def _sums_in_tiles(kernels: RowKernels, run: Run, read: Rows, found: Variant, adds: str) -> list[Tensor]:
    """The sums of runs of 64 rows, and for `BOTH` those of runs of each row, in one pass.

    A job is 64 rows of a parameter, or those that are left.
    """
    compiled, view = kernels.of(found, read.dtypes, adds), read.view
    groups, size, results = -(-view.rows // DOWN), compiled.kernel.step, results_of(found.update.stages[0])
    job = _count(view.matrices * groups)
    first = job // groups * view.rows + job % groups * DOWN
    many = torch.clamp(view.rows - job % groups * DOWN, max=DOWN)
    columns = torch.full_like(many, view.columns)
    sums = [_room(view, r.by_columns) for r in results]
    whole = view.columns // size * size
    strips = [(0, whole), (view.columns - size, size)]  # the last columns twice, if they are no whole step
    if adds == BOTH:  # rows are whole steps of the loop, and the driver is to leave the end of the last run to it
        strips = [(0, -(view.columns // -size) * size)]
    for at, length in strips if whole < view.columns else strips[:1]:
        offsets = [
            (job * view.columns + at) * 8 if r.by_columns else first * (8 * x.shape[-1])
            for r, x in zip(results, sums, strict=True)
        ]
        outs = Outs(Outs.of_one(sums, job).addresses, offsets)
        table = read.addresses(first * view.columns + at, outs, (columns, many))
        run(read.step(compiled, table, first, torch.full_like(many, length)))
    return sums


def stored(kernels: RowKernels, run: Run, read: Rows, found: Variant, more: Sequence[Sequence[Tensor]]) -> Tensor:
    """Runs the last stage, which stores the new components; the measurements. NotEmitted if there is no code for it.

    `more` are the tensors of each parameter that it writes and does not read.
    """
    compiled = kernels.of(found, (*read.dtypes, *(t.dtype for t in more[0])))
    every = _count(read.view.matrices * read.view.rows)
    begins = _addresses(more).view(read.view.params, -1)
    outs = Outs(begins, [every * (read.view.columns * t.element_size()) for t in more[0]])
    table = read.addresses(every * read.view.columns, outs)
    measures = len(found.update.sums) + len(found.update.counts)
    return run(read.step(compiled, table, every, torch.full_like(every, read.view.columns), measures))


def disjoint(tensors: Sequence[Tensor], written: Sequence[bool]) -> bool:
    """Returns True if nothing that is written shares memory with another of the tensors."""
    begins = [t.data_ptr() for t in tensors]
    return not share_memory(begins, [a + t.nbytes for a, t in zip(begins, tensors, strict=True)], written)


def run_by_rows(launch: Launch, kernels: RowKernels, run: Run) -> list[Measure]:
    """Runs a launch; its measurements, of each parameter, if the update has any."""
    if launch.finite is not None and not bool(launch.finite):
        return [nothing_of(launch)] * len(launch.reads) if launch.update.sums else []
    measured = dict[int, Measure]()
    for numbers in _together(launch):
        own = _Alike(launch.part(numbers), kernels, run).run()
        measured |= dict(zip(numbers, own, strict=True)) if launch.update.sums else {}
    return [measured[i] for i in sorted(measured)]


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
        ones = (self.launch.part([i]) for i in range(len(self.launch.reads)))
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
        """The sums of runs of each result of a reduction stage; NotEmitted if there is no code for it."""
        results, sums = results_of(part.stages[0]), dict[int, Tensor]()
        whole_steps = not view_of(components[0][0].shape)[-1] % (2 * self.kernels.machine.target.width)
        is_one_pass = whole_steps and any(r.by_columns for r in results)
        for adds in {BOTH} if is_one_pass else {COLUMNS if r.by_columns else ROWS for r in results}:
            found = self.kernels.variant(part, adds)
            rows = Rows.of(found, components, self.launch.vector, values)
            if adds == ROWS:
                own = _sums_of_rows(self.kernels, self.run_step, rows, found)
            else:
                own = _sums_in_tiles(self.kernels, self.run_step, rows, found, adds)
            sums |= dict(zip(found.results, own, strict=True))
        return [sums[i] if len(components) > 1 else sums[i][0] for i in range(len(results))]

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


def nothing_of(launch: Launch) -> Measure:
    """The measurements of a launch that was skipped, which nobody uses."""
    return Measure(
        torch.zeros(len(launch.update.sums), dtype=torch.float32, device="cpu"),
        torch.zeros(len(launch.update.counts), dtype=torch.int64, device="cpu"),
    )
