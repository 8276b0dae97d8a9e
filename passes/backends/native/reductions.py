"""Updates with reductions over rows or columns: each row of a parameter is a job, whose scalars have its values.

Values of columns are tensors beside the components. Parameters of one shape are updated together. A reduction stage
takes one pass over memory (`TileWriter`), or one for its sums over columns and one for those over rows where rows
are no whole steps of a loop. What there is no code for is left to the reference backend: short rows, parameters that
are not contiguous, random bits.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.reductions import COLUMN, DOWN, NUMBER, RUN, view_of
from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.jobs import Step
from collage_neuron.passes.backends.native.kernel import Compiled, Kernels, write_kernel
from collage_neuron.passes.backends.native.llvm_builder import NotEmitted
from collage_neuron.passes.backends.native.memory import in_memory, share_memory
from collage_neuron.passes.backends.native.reduction_kernels import write_runs, write_tiles
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.staged import Values, find_by_rows, results_of, store_small
from collage_neuron.passes.ir.stage import rearranged
from collage_neuron.passes.ir.update import Update

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
    adds: str


def variant(part: Update, adds: str) -> Variant:
    """That of the last stage; of a reduction stage, that of some sums."""
    (stage,) = part.stages
    columns = tuple(name for name in stage.numbers if part.extents.get(name, NUMBER) == COLUMN)
    numbers = tuple(name for name in stage.numbers if name not in columns)
    keys = (*stage.inputs, *columns)
    others = (str(n.target) for n in stage.body.nodes if n.op == "placeholder" and n.target not in (*keys, *numbers))
    wanted = {ROWS: (False,), COLUMNS: (True,), BOTH: (False, True)}[adds]
    results = tuple(i for i, r in enumerate(results_of(stage) if stage.reduced else ()) if r.by_columns in wanted)
    found = [stage.results[i] for i in results] if stage.reduced else stage.results
    body = rearranged(stage.body, (*keys, *others, *numbers), found)
    reduced = tuple(stage.reduced[i] for i in results)
    own = replace(stage, body=body, inputs=keys, numbers=numbers, reduced=reduced)
    return Variant(replace(part, stages=(own,), inputs=keys), columns, numbers, results, adds)


def kernel_of(kernels: Kernels, found: Variant, dtypes: tuple[torch.dtype, ...]) -> Compiled:
    """The kernel of a variant for tensors of these dtypes; NotEmitted if there is none."""
    update = found.update
    if found.adds != ROWS:
        compiled = kernels.compiled(write_tiles, update, dtypes, len(found.columns))
    elif update.stages[0].reduced:
        compiled = kernels.compiled(write_runs, update, dtypes)
    else:
        compiled = kernels.compiled(write_kernel, update, False, dtypes)
    if compiled is None:
        raise NotEmitted(f"the stage {update.stages[0]}")
    return compiled


Slots = Sequence[tuple[Iterable[Tensor], Tensor]]
"""For each slot of a kernel its tensors, one of each parameter, and the bytes from where these begin to what each job
of a parameter works on."""


@dataclass
class Rows:
    """Parameters of one shape, and what a variant of their update reads."""

    components: Sequence[Sequence[Tensor]]
    """For each parameter: contiguous."""
    columns: Sequence[Tensor]
    """Values of columns: [parameters, matrices, 1, columns]."""
    scalars: Tensor
    """The scalars of each row."""

    @classmethod
    def of(cls, found: Variant, components: Sequence[Sequence[Tensor]], scalars: Tensor, values: Values) -> Rows:
        """What the variant reads."""
        count, (matrices, rows, columns) = len(components), view_of(components[0][0].shape)
        of_columns = [values[name].expand(count, matrices, 1, columns).contiguous() for name in found.columns]
        # A row is a job with scalars of its own, so values of matrices, and numbers, are repeated for each of its rows.
        each = [values[name].expand(count, matrices, rows, 1).reshape(-1, 1) for name in found.numbers]
        of_rows = scalars.expand(count, -1).repeat_interleave(matrices * rows, 0)
        return cls(components, of_columns, torch.cat([of_rows, *each], dim=1))

    @cached_property
    def view(self) -> tuple[int, int, int]:
        """How many matrices, rows and columns each parameter has."""
        return view_of(self.components[0][0].shape)

    @property
    def every(self) -> Tensor:
        """The numbers of all rows of a parameter."""
        return _count(self.view[0] * self.view[1])

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Those of all tensors that a kernel reads."""
        return tuple(t.dtype for t in (*self.components[0], *self.columns))

    def room(self, by_columns: bool) -> Tensor:
        """A tensor for the sums of runs of 64 rows, or else for those of runs of each row."""
        matrices, rows, columns = self.view
        runs = (-(-rows // DOWN), columns) if by_columns else (rows, -(-columns // RUN))
        return torch.empty(len(self.components), matrices, *runs, dtype=torch.float64, device="cpu")

    def table(self, first: Tensor, outs: Slots, more: Sequence[Tensor] = ()) -> Tensor:
        """What a kernel finds, for each parameter and job: the addresses of tensors from the element `first` on.

        `outs` are tensors that it writes and does not read; `more` are further numbers of each job, behind them.
        """
        _, rows, columns = self.view
        # Each matrix has its own values of columns, one fp32 number a column, whichever row the element is in.
        at_columns = (first // columns // rows * columns + first % columns) * 4
        slots: list[tuple[Iterable[Tensor], Tensor]] = [
            *((own, first * own[0].element_size()) for own in zip(*self.components, strict=True)),
            *((of_columns, at_columns) for of_columns in self.columns),
            *outs,
        ]
        addresses = [_addresses(tensors)[:, None] + offsets for tensors, offsets in slots]
        return torch.stack([*addresses, *(x.expand(len(self.components), -1) for x in more)], dim=2).contiguous()

    def step(self, compiled: Compiled, table: Tensor, rows: Tensor, length: int, measures: int = 0) -> Step:
        """The work of jobs that begin in these rows of each parameter, with this table, on rows of that length.

        `measures` are those of each parameter.
        """
        count, jobs, width = table.shape
        scalars = 4 * self.scalars.shape[1]
        steps = compiled.unit * -(length // -compiled.kernel.step)
        found = torch.empty(count, jobs, len(JOB), dtype=torch.int64, device="cpu")
        every, each = _count(count)[:, None], _count(count * jobs).view(count, jobs)
        numbers: tuple[Tensor | int, ...] = (
            compiled.address,
            table.data_ptr() + 8 * width * each,
            self.scalars.data_ptr() + scalars * (every * len(self.every) + rows),
            length,
            steps * each,
            steps,
            every * (measures * compiled.kernel.width),
        )
        for i, number in enumerate(numbers):  # in torch, and not in Python, since there is a job for each row
            found[..., i] = number
        described = array("q", ctypes.string_at(found.data_ptr(), found.nbytes))
        elements = sum(own[0].numel() for own in self.components)
        step = Step(jobs=described, work=steps * count * jobs, elements=elements, measures=measures * count)
        step.kept.append((self, table))
        return step


def _count(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.int64, device="cpu")


def _addresses(tensors: Iterable[Tensor]) -> Tensor:
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device="cpu")


Run = Callable[[Step], Tensor]
"""Runs the jobs of a step; returns the measurements."""


def run_by_rows(launch: Launch, kernels: Kernels, run: Run) -> list[Measure]:
    """Runs a launch; its measurements, of each parameter, if the update has any."""
    if not launch.is_taken:
        return [nothing_of(launch)] * len(launch.reads) if launch.update.sums else []
    measured = dict[int, Measure]()
    is_shared = _memory_is_shared(launch)
    groups = [[i] for i in range(len(launch.reads))] if is_shared else _together(launch)
    for numbers in groups:
        own = _Alike(launch if len(groups) == 1 else launch.part(numbers), kernels, run).run(is_shared)
        measured |= dict(zip(numbers, own, strict=True)) if launch.update.sums else {}
    return [measured[i] for i in sorted(measured)]


def _together(launch: Launch) -> list[list[int]]:
    """The numbers of parameters of one shape and of equal dtypes."""
    groups: dict[object, list[int]] = {}
    for i, (reads, writes) in enumerate(zip(launch.reads, launch.writes, strict=True)):
        key = reads[0].shape, *((type(t), t.dtype, t.is_contiguous()) for t in (*reads, *writes))
        groups.setdefault(key, []).append(i)
    return [*groups.values()]


def _memory_is_shared(launch: Launch) -> bool:
    """Returns True if something that is written shares memory with another tensor."""
    tensors, written = list[Tensor](), list[bool]()
    for reads, writes in zip(launch.reads, launch.writes, strict=True):
        more = _only_written(reads, writes)
        tensors += [*reads, *more]
        ids = {*map(id, writes)}
        written += [*(id(t) in ids for t in reads), *(True for _ in more)]
    begins = [t.data_ptr() for t in tensors]
    return share_memory(begins, [a + t.nbytes for a, t in zip(begins, tensors, strict=True)], written)


def _only_written(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[Tensor]:
    ids = {*map(id, reads)}
    return [t for t in writes if id(t) not in ids]


class _Alike:
    """Parameters of one shape."""

    def __init__(self, launch: Launch, kernels: Kernels, run: Run) -> None:
        self.launch, self.kernels, self.run_step, self.update = launch, kernels, run, launch.update
        self.step = 2 * kernels.machine.target.width
        """Elements in one step of a loop."""

    def run(self, may_share: bool) -> list[Measure]:
        """Runs the update, of tensors that may share memory; its measurements, if it has any."""
        try:
            reads = self._contiguous(may_share)
            values, found = find_by_rows(self.launch._replace(reads=reads), self._sums)
            totals = self._stored(reads, values)
        except NotEmitted:  # nothing has been written
            ones = (self.launch.part([i]) for i in range(len(self.launch.reads)))
            return [measure for one in ones for measure in REFERENCE.run_one(one)]
        store_small(self.launch, found)
        middle, count = len(self.update.sums), len(self.launch.reads)
        sums = totals.sum((0, 2)).view(count, -1) if middle else ()
        return [Measure(own[:middle], own[middle:].to(torch.int64)) for own in sums]

    def _contiguous(self, may_share: bool) -> list[list[Tensor]]:
        """The components; NotEmitted unless rows are long enough, and what is written is contiguous, and in place."""
        place = {key: i for i, key in enumerate(self.update.inputs)}
        kept = [(place[key], j) for j, key in enumerate(self.update.outputs) if key in place]
        pairs = list(zip(self.launch.reads, self.launch.writes, strict=True))
        is_fit = not self.update.draws and all(
            in_memory(reads)
            and all(t.data_ptr() and t.shape == reads[0].shape for t in reads)
            and reads[0].shape[-1] >= self.step
            and all(t.is_contiguous() and t.shape == reads[0].shape for t in writes)
            and all(reads[i] is writes[j] for i, j in kept)
            for reads, writes in pairs
        )
        if not is_fit or (may_share and _memory_is_shared(self.launch)):
            raise NotEmitted("rows of these tensors")
        return [[t.contiguous() for t in reads] for reads, _ in pairs]

    def _sums(self, part: Update, components: Sequence[Sequence[Tensor]], values: Values) -> Sequence[Tensor]:
        """The sums of runs of each result of a reduction stage; NotEmitted if there is no code for it."""
        results, sums = results_of(part.stages[0]), dict[int, Tensor]()
        whole_steps = not view_of(components[0][0].shape)[-1] % self.step
        is_one_pass = whole_steps and any(r.by_columns for r in results)
        for adds in {BOTH} if is_one_pass else {COLUMNS if r.by_columns else ROWS for r in results}:
            found = self.kernels.once(variant, part, adds)
            rows = Rows.of(found, components, self.launch.vector, values)
            add = self._sums_of_rows if adds == ROWS else self._sums_in_tiles
            sums |= dict(zip(found.results, add(rows, found), strict=True))
        return [sums[i] if len(components) > 1 else sums[i][0] for i in range(len(results))]

    def _sums_of_rows(self, read: Rows, found: Variant) -> list[Tensor]:
        """The sums of runs of each row, for the results of a variant."""
        compiled, columns = kernel_of(self.kernels, found, read.dtypes), read.view[-1]
        sums = [read.room(False) for _ in found.results]
        table = read.table(read.every * columns, [(x, read.every * (8 * x.shape[-1])) for x in sums])
        self.run_step(read.step(compiled, table, read.every, columns))
        return sums

    def _sums_in_tiles(self, read: Rows, found: Variant) -> list[Tensor]:
        """The sums of runs of 64 rows, and for `BOTH` those of runs of each row, in one pass.

        A job is 64 rows of a parameter, or those that are left.
        """
        compiled, (matrices, rows, columns) = kernel_of(self.kernels, found, read.dtypes), read.view
        groups, size, results = -(-rows // DOWN), compiled.kernel.step, results_of(found.update.stages[0])
        job = _count(matrices * groups)
        first = job // groups * rows + job % groups * DOWN
        many = torch.clamp(rows - job % groups * DOWN, max=DOWN)
        sums = [read.room(r.by_columns) for r in results]
        whole = columns // size * size
        strips = [(0, whole), (columns - size, size)]  # the last columns twice, if they are no whole step
        if found.adds == BOTH:  # rows are whole steps of the loop: the driver is to leave the end of the last run to it
            strips = [(0, -(columns // -size) * size)]
        for at, length in strips if whole < columns else strips[:1]:
            offsets = [(job * columns + at) * 8 if r.by_columns else first * (8 * x.shape[-1])
                       for r, x in zip(results, sums, strict=True)]  # fmt: skip
            outs = list(zip(sums, offsets, strict=True))
            table = read.table(first * columns + at, outs, (torch.full_like(many, columns), many))
            self.run_step(read.step(compiled, table, first, length))
        return sums

    def _stored(self, reads: Sequence[Sequence[Tensor]], values: Values) -> Tensor:
        """Stores the new components; the measurements. NotEmitted if there is no code for it."""
        found = self.kernels.once(variant, self.update.parts[-1], ROWS)
        read = Rows.of(found, reads, self.launch.vector, values)
        more = [_only_written(*pair) for pair in zip(self.launch.reads, self.launch.writes, strict=True)]
        compiled = kernel_of(self.kernels, found, (*read.dtypes, *(t.dtype for t in more[0])))
        first = read.every * read.view[-1]
        table = read.table(first, [(own, first * own[0].element_size()) for own in zip(*more, strict=True)])
        measures = len(found.update.sums) + len(found.update.counts)
        # Before anything is written: after an interrupt in between, the versions say that a step was begun.
        torch.autograd.graph.increment_version([t for own in self.launch.writes for t in own])
        return self.run_step(read.step(compiled, table, read.every, read.view[-1], measures))


def nothing_of(launch: Launch) -> Measure:
    """The measurements of a launch that was skipped, which nobody uses."""
    return Measure(
        torch.zeros(len(launch.update.sums), dtype=torch.float32, device="cpu"),
        torch.zeros(len(launch.update.counts), dtype=torch.int64, device="cpu"),
    )
