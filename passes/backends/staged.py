"""Runs the stages of an update before its last one (`ir/stage.py`): they find the values that the last one reads.

A backend adds up elements, and runs the last stage. All else is done here, alike for all backends and for all
parameters of a launch. Of an update with reductions over whole tensors (`numerics.tensor_sums`) each value is a number,
one for each parameter, which the last stage reads after the scalar vector. States of one number are numbers too: read
before the first stage, and stored when the last one has been run.

Given an update with reductions over rows or columns (`numerics.matrix_sums`; a second moment of Adafactor)::

    stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
    stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0     (the new state, a value for each row)
    stage 2, elementwise:  param, grad, number0 -> param

parameters have one shape: values of rows have the shape [matrices, rows, 1], those of columns [matrices, 1, columns],
so that they broadcast. Several parameters are a dimension before these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics import matrix_sums, tensor_sums
from collage_neuron.numerics.matrix_sums import COLUMN, ELEMENT, ENDINGS, NUMBER, shape_of, terms_in, view_of
from collage_neuron.numerics.tensor_sums import OF_TENSOR, Reduction, folded_over
from collage_neuron.passes.backends.protocol import Across, Found, Launch
from collage_neuron.passes.ir.stage import BETWEEN, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Values = Mapping[str, Tensor]
"""Values of rows, columns and matrices, and numbers, by name."""

Reduce = Callable[[Launch, Tensor], Sequence[Tensor]]
"""Runs a reduction. It is given a launch of a part (`Update.parts`) and the scalar vectors of its parameters, one in
each row; it returns for each result of the stage a 1-D fp32 tensor: a number for each parameter."""

SumGroups = Callable[[Launch, Tensor], Sequence[Sequence[Tensor]]]
"""Sums groups of 64 runs of a reduction's operands. It is given a launch of a part (`Update.parts`) and the scalar
vectors of its parameters, one in each row; it returns for each parameter a 1-D fp64 tensor for each result."""

SumRuns = Callable[[Update, Sequence[Sequence[Tensor]], Values], Sequence[Tensor]]
"""Sums the runs of a reduction's operands for a part (`Update.parts`), the components of each parameter, and the values
that it reads.

For each result it returns fp64 sums: of shape [matrices, runs of 64 rows, columns] for one of columns, and else of
shape [matrices, rows, runs of 128 elements]. If there are several parameters, they are the first dimension."""

Compute = Callable[[Stage, Sequence[Tensor]], Sequence[Tensor]]
"""Computes the results of a stage of numbers, from the scalar vector's entries and the values that it reads."""

Search = Generator[tuple[Update, Values], Sequence[Tensor], tuple[dict[str, Tensor], Found]]
"""The stages before the last one. It yields a reduction's part, and the values that are known; it is sent its results,
in fp32: of the shape of their extent, after a dimension for parameters if there are several. It returns all values by
name, and new values of the states without a value for each element."""


class Reduced(NamedTuple):
    """A result of a reduction stage over rows or columns."""

    operation: object
    extent: str

    @property
    def by_columns(self) -> bool:
        """Returns True if columns are added up, and not rows."""
        return self.extent == COLUMN


def results_of(stage: Stage) -> list[Reduced]:
    """What each result of a reduction stage over rows or columns is."""
    return [Reduced(node.target, str(node.args[1])) for node in stage.results]


def kinds_of(stage: Stage) -> list[Any]:
    """The operation of each result of a reduction over tensors: `sum_of`, `mean_of` or `norm_of`."""
    return [result.target for result in stage.results]


def reductions_of(stage: Stage) -> list[Reduction]:
    """What each result of a reduction over tensors adds up."""
    return [OF_TENSOR[kind] for kind in kinds_of(stage)]


def find(launch: Launch, sum_groups: SumGroups) -> Found:
    """Runs the stages before the last one, for all parameters of a launch; the host finishes the sums of tensors."""
    return find_by(launch, lambda part, rows: _finished(part, sum_groups(part, rows), rows.device))


def find_by(launch: Launch, reduce: Reduce, compute: Compute | None = None) -> Found:
    """The same for a backend that finishes sums itself, and computes with numbers (`compute`) if torch's must not."""
    scalars = _scalars(launch).expand(len(launch.reads), -1)

    def results(part: Update, numbers: Values) -> Sequence[Tensor]:
        return reduce(_launch_of(part, launch), _rows(scalars, part.stages[0], numbers))

    return _driven(searching(launch, compute), results)[1]


def find_rows(launch: Launch, sum_runs: SumRuns) -> tuple[dict[str, Tensor], Found]:
    """Runs them where rows or columns are added up, of parameters of one shape; returns what `Search` does."""
    view = seen_view(launch)
    components = [dict(zip(launch.update.inputs, reads, strict=True)) for reads in launch.reads]

    def results(part: Update, values: Values) -> list[Tensor]:
        runs = sum_runs(part, [[of_one[key] for key in part.inputs] for of_one in components], values)
        return [_finished_rows(r, x, view) for r, x in zip(results_of(part.stages[0]), runs, strict=True)]

    return _driven(searching(launch), results)


def _driven(search: Search, results: Callable[[Update, Values], Sequence[Tensor]]) -> tuple[dict[str, Tensor], Found]:
    answer: Any = None  # begins the search
    while True:
        try:
            part, values = search.send(answer)
        except StopIteration as end:
            found: tuple[dict[str, Tensor], Found] = end.value
            return found
        answer = results(part, values)


def searching(launch: Launch, compute: Compute | None = None) -> Search:
    """The same step by step: whoever drives it runs the reductions, and computes with numbers if torch must not."""
    update, count, scalars = launch.update, len(launch.reads), _scalars(launch)
    shape, entries = _shapes(launch), _entries(launch, scalars)
    values = {name: torch.stack([of_one[name] for of_one in launch.small]).reshape(shape(name))
              for name in update.reads_small}  # fmt: skip
    for part in update.parts[:-1]:
        (stage,) = part.stages
        if stage.kind == REDUCTION:
            found = yield part, values
        else:
            found = (compute or computed)(stage, [*entries, *(values[name] for name in stage.numbers)])
        if stage.kind == BETWEEN and launch.across is not None:
            found = _of_processes(stage, found, launch.across)
        values |= dict(zip(stage.reduced, found, strict=True))
    small = {
        name: values[number].expand(shape(name)).reshape(count, *launch.small[0][name].shape)
        for name, number in update.small.items()
        if number != name
    }
    rows = scalars.expand(count, -1)
    return values, Found(rows if update.by_rows else _rows(rows, update.stages[-1], values), small)


def _scalars(launch: Launch) -> Tensor:
    return launch.vector.to(launch.reads[0][0].device)


def _entries(launch: Launch, scalars: Tensor) -> Sequence[Tensor]:
    """The entries of the scalar vector, in shapes that broadcast with values."""
    if not launch.update.by_rows:
        return scalars.expand(len(launch.reads), -1).unbind(1)
    return [x if x.dim() == 0 else x.reshape(-1, 1, 1, 1) for x in scalars.unbind(-1)]


def _shapes(launch: Launch) -> Callable[[str], tuple[int, ...]]:
    """The shape of a value, by its name: a number for each parameter, or what rows and columns have.

    Of several parameters, one after another in the first dimension, all values of rows and columns have four.
    """
    update, lead = launch.update, (len(launch.reads),)
    if not update.by_rows:
        return lambda name: lead
    view = seen_view(launch)

    def shape(name: str) -> tuple[int, ...]:
        own = shape_of(update.extents.get(name, NUMBER), view)
        return (*lead, *(own or (1, 1, 1))) if len(launch.reads) > 1 else own

    return shape


def seen_view(launch: Launch) -> tuple[int, int, int]:
    """The matrices, rows and columns of its parameters, as the update sees them."""
    return view_of(launch.update.seen_as or launch.reads[0][0].shape)


def computed(stage: Stage, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of a stage of numbers, by torch."""
    found: Sequence[Tensor] = stage.graph(*given)
    return found


def _of_processes(stage: Stage, own: Sequence[Tensor], across: Across) -> list[Tensor]:
    """Numbers of all processes, from those of this one: in one message, where they are treated alike."""
    found = dict[int, Tensor]()
    kinds = [node.args[1:] for node in stage.results]
    for how, group in dict.fromkeys(kinds):
        places = [i for i, kind in enumerate(kinds) if kind == (how, group)]
        each = across(torch.cat([own[i] for i in places]), str(how), str(group)).split(len(own[0]))
        found |= dict(zip(places, each, strict=True))
    return [found[i] for i in range(len(kinds))]


def store_small(launch: Launch, found: Found) -> None:
    """Writes the states of one number, after the last stage has been run, unless the launch is skipped."""
    for name, values in found.small.items():
        for state, new in zip(launch.small, values.unbind(), strict=True):
            old = state[name]
            old.copy_(new if launch.finite is None else torch.where(launch.finite.to(old.device), new, old))


def _rows(scalars: Tensor, stage: Stage, numbers: Values) -> Tensor:
    """The scalar vector and the numbers that a stage reads, for each parameter."""
    return torch.cat([scalars, *(numbers[name][:, None] for name in stage.numbers)], dim=1)


def _launch_of(part: Update, launch: Launch) -> Launch:
    """The launch of a part that reads components and stores none."""
    places = [launch.update.inputs.index(key) for key in part.inputs]
    reads = [[components[i] for i in places] for components in launch.reads]
    return launch._replace(update=part, reads=reads, writes=[()] * len(reads), kept=None, small=())


def _finished(launch: Launch, groups: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """The numbers of a reduction from the sums of groups of each parameter, on the host."""
    of_elements = [i for i, key in enumerate(launch.update.inputs) if key not in launch.update.blocks]
    sizes = [components[of_elements[0]].numel() for components in launch.reads]
    reductions = reductions_of(launch.update.stages[0])
    found = [tensor_sums.finished(r, of, sizes) for r, of in zip(reductions, zip(*groups, strict=True), strict=True)]
    return [torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32).to(device) for x in found]


def _finished_rows(result: Reduced, runs: Tensor, view: tuple[int, int, int]) -> Tensor:
    sums = folded_over(runs, -2 if result.by_columns else -1)
    terms = terms_in(view, ELEMENT, result.extent)
    return matrix_sums.finished(ENDINGS[result.operation], sums, result.extent, terms)
