"""Updates with reductions over rows or columns: each row of a parameter is a job, whose scalars have its values.

Values of columns are tensors beside the components. Sums over rows are found by the kernels of `runs`, those over
columns by the kernels of `down`, in a pass over memory for each stage and direction.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.matrix_sums import COLUMN, DOWN, NUMBER, view_of
from collage_neuron.numerics.tensor_sums import RUN
from collage_neuron.passes.backends.by_rows import Values, results_of
from collage_neuron.passes.backends.native.code import NotEmitted
from collage_neuron.passes.backends.native.down import write_down
from collage_neuron.passes.backends.native.jobs import Bound, Compiled, Step
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.memory import is_plain, share_memory
from collage_neuron.passes.backends.native.runs import write_runs
from collage_neuron.passes.ir.update import Update

Dtypes = tuple[torch.dtype, ...]


class Variant(NamedTuple):
    """A part of an update as a kernel sees it: values of columns are components, those of rows are scalars."""

    update: Update
    columns: tuple[str, ...]
    """The names of the values of columns, which are its last inputs."""
    numbers: tuple[str, ...]
    """Those of all others."""
    results: tuple[int, ...]
    """Of a reduction stage, the numbers of the results that it computes."""


def variant(part: Update, by_columns: bool = False) -> Variant:
    """That of the last stage; of a reduction stage, that of sums over columns, or of all others."""
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
    results = tuple(i for i, r in enumerate(results_of(stage) if stage.reduced else ()) if r.by_columns == by_columns)
    body.output(tuple(found[i] for i in results) if stage.reduced else found)
    body.eliminate_dead_code()
    keys = (*stage.inputs, *columns)
    reduced = tuple(stage.reduced[i] for i in results)
    own = replace(stage, body=body, inputs=keys, numbers=numbers, reduced=reduced)
    return Variant(replace(part, stages=(own,), inputs=keys), columns, numbers, results)


class RowKernels:
    """The kernels of all such updates that are still in use."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._variants: WeakKeyDictionary[Update, dict[bool, Variant]] = WeakKeyDictionary()
        self._compiled: WeakKeyDictionary[Update, dict[Dtypes, Compiled | None]] = WeakKeyDictionary()

    def variant(self, part: Update, by_columns: bool = False) -> Variant:
        """`variant`, remembered."""
        known = self._variants.setdefault(part, {})
        if by_columns not in known:
            known[by_columns] = variant(part, by_columns)
        return known[by_columns]

    def of(self, found: Variant, dtypes: Dtypes, by_columns: bool = False) -> Compiled | None:
        """The kernel of a variant for tensors of these dtypes; None if there is no code for it."""
        kernels = self._compiled.setdefault(found.update, {})
        if dtypes not in kernels:
            kernels[dtypes] = self._made(found, dtypes, by_columns)
        return kernels[dtypes]

    def _made(self, found: Variant, dtypes: Dtypes, by_columns: bool) -> Compiled | None:
        update, width = found.update, self._machine.target.width
        if not update.stages[0].reduced:
            return Bound(update, self._machine).kernel(update, False, dtypes)
        try:
            if by_columns:
                return Compiled.of(write_down(update, dtypes, len(found.columns), width), self._machine)
            return Compiled.of(write_runs(update, dtypes, width), self._machine)
        except NotEmitted:
            return None

    def suit(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if rows of these tensors are long enough, and lie in memory one after another."""
        return (
            all(is_plain(type(t)) and t.is_cpu and not t.is_neg() and t.data_ptr() for t in tensors)
            and all(t.shape == tensors[0].shape for t in tensors)
            and tensors[0].shape[-1] >= 2 * self._machine.target.width
        )


class Rows(NamedTuple):
    """A parameter, and what a variant of its update reads."""

    view: tuple[int, int, int]
    components: Sequence[Tensor]
    """Contiguous."""
    columns: Sequence[Tensor]
    scalars: Tensor
    """The scalars of each row."""

    @classmethod
    def of(cls, found: Variant, components: Sequence[Tensor], scalars: Tensor, values: Values) -> Rows:
        """What the variant reads."""
        matrices, rows, columns = view = view_of(components[0].shape)
        of_columns = [values[name].expand(matrices, 1, columns).contiguous() for name in found.columns]
        each = [values[name].expand(matrices, rows, 1).reshape(-1, 1) for name in found.numbers]
        own = torch.cat([scalars.expand(matrices * rows, -1), *each], dim=1).contiguous()
        return cls(view, components, of_columns, own)

    @property
    def dtypes(self) -> Dtypes:
        """Those of all tensors that a kernel reads."""
        return tuple(t.dtype for t in (*self.components, *self.columns))

    def addresses(self, first: Tensor, others: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """For each job the addresses of its tensors: at the element `first`, and others at offsets in bytes."""
        row, column = first // self.view[2], first % self.view[2]
        at_columns = row // self.view[1] * self.view[2] + column
        return torch.stack(
            [t.data_ptr() + first * t.element_size() for t in self.components]
            + [t.data_ptr() + at_columns * t.element_size() for t in self.columns]
            + [t.data_ptr() + offsets for t, offsets in others],
            dim=1,
        )

    def step(self, compiled: Compiled, table: Tensor, rows: Tensor, lengths: Tensor, measures: int = 0) -> Step:
        """The work of jobs that begin in these rows, with these addresses, on rows of these lengths."""
        steps = compiled.unit * -(lengths // -compiled.kernel.step)
        before = steps.cumsum(0) - steps
        addresses = table.data_ptr() + 8 * table.shape[1] * torch.arange(len(table))
        scalars = self.scalars.data_ptr() + self.scalars.shape[1] * 4 * rows
        columns = [addresses, scalars, lengths, before, steps]
        kernel, nothing = torch.full_like(steps, compiled.address), torch.zeros_like(steps)
        jobs = torch.stack([kernel, *columns, nothing], dim=1)
        elements = self.view[0] * self.view[1] * self.view[2]
        described = array("q", ctypes.string_at(jobs.data_ptr(), jobs.nbytes))
        found = Step(jobs=described, work=int(steps.sum()), elements=elements, measures=measures)
        found.kept.append((self, table))
        return found


def sums_of_rows(kernels: RowKernels, run: Callable[[Step], object], read: Rows, found: Variant) -> list[Tensor] | None:
    """The sums of runs of each row, for the results of a variant; None if there is no code for it."""
    compiled = kernels.of(found, read.dtypes)
    if compiled is None:
        return None
    matrices, rows, columns = read.view
    runs, every = -(-columns // RUN), torch.arange(matrices * rows)
    sums = [torch.empty(matrices, rows, runs, dtype=torch.float64) for _ in found.results]
    table = read.addresses(every * columns, [(t, every * (8 * runs)) for t in sums])
    run(read.step(compiled, table, every, torch.full_like(every, columns)))
    return sums


def sums_of_columns(
    kernels: RowKernels, run: Callable[[Step], object], read: Rows, found: Variant
) -> list[Tensor] | None:
    """The sums of runs of 64 rows, for the results of a variant; None if there is no code for it."""
    compiled = kernels.of(found, read.dtypes, by_columns=True)
    if compiled is None:
        return None
    matrices, rows, columns = read.view
    groups, size = -(-rows // DOWN), compiled.kernel.step
    sums = [torch.empty(matrices, groups, columns, dtype=torch.float64) for _ in found.results]
    job = torch.arange(matrices * groups)
    first = job // groups * rows + job % groups * DOWN  # the first row of each run
    many = torch.clamp(rows - job % groups * DOWN, max=DOWN)
    whole = columns // size * size
    for at, length in ((0, whole), (columns - size, size if columns > whole else 0)):
        if not length:
            continue
        outs = [(t, (job * columns + at) * 8) for t in sums]
        table = read.addresses(first * columns + at, outs)
        table = torch.cat([table, torch.full_like(many, columns)[:, None], many[:, None]], dim=1).contiguous()
        run(read.step(compiled, table, first, torch.full_like(many, length)))
    return sums


def stored(
    kernels: RowKernels, run: Callable[[Step], Tensor], read: Rows, found: Variant, more: Sequence[Tensor]
) -> Tensor | None:
    """Runs the last stage, which stores the new components; the measurements, or None if there is no code for it.

    `more` are the tensors that it writes and does not read.
    """
    compiled = kernels.of(found, (*read.dtypes, *(t.dtype for t in more)))
    if compiled is None:
        return None
    matrices, rows, columns = read.view
    every = torch.arange(matrices * rows)
    table = read.addresses(every * columns, [(t, every * (columns * t.element_size())) for t in more])
    measures = len(found.update.sums) + len(found.update.counts)
    return run(read.step(compiled, table, every, torch.full_like(every, columns), measures))


def disjoint(read: Sequence[Tensor], written: Mapping[int, Tensor], more: Sequence[Tensor]) -> bool:
    """Returns True if nothing that is written shares memory with another tensor of the parameter."""
    tensors = [*read, *more]
    begins = [t.data_ptr() for t in tensors]
    ends = [t.data_ptr() + t.nbytes for t in tensors]
    return not share_memory(begins, ends, [i in written or i >= len(read) for i in range(len(tensors))])
