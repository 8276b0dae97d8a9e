"""Runs the stages of an update before its last one (`ir/stage.py`): they find the numbers that the last one reads.

Given (a second moment of rows, as Adafactor has it)::

    stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
    stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0     (the new state, a value for each row)
    stage 2, elementwise:  param, grad, number0 -> param

a backend adds up the elements of stage 0, and runs stage 2. What is between is done here, alike for all. A number of a
whole tensor (`numerics.reductions`) has one dimension, of parameters, and follows the scalar vector of its parameter.
If rows or columns are reduced (`numerics.reductions`), parameters have one shape: values of rows are [matrices, rows,
1], those of columns [matrices, 1, columns], so that they broadcast; several parameters are a dimension before these.
States without a value for each element are read before the first stage, and stored when the last one has been run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.reductions import (
    COLUMN,
    ELEMENT,
    ENDINGS,
    NUMBER,
    OF_TENSOR,
    Reduction,
    finish_each,
    finished,
    folded_over,
    shape_of,
    terms_in,
    view_of,
)
from collage_neuron.passes.backends.protocol import Across, Found, Launch
from collage_neuron.passes.ir.stage import BETWEEN, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Values = Mapping[str, Tensor]
"""What the stages have found, and the states that they read, by name."""

Reduce = Callable[[Update, Values], Sequence[Tensor]]
"""Runs a reduction: a part (`Update.parts`), with the values that are known. Its results are fp32, one for each
parameter, or of the shape of their extent."""

SumGroups = Callable[[Launch, Tensor], Sequence[Sequence[Tensor]]]
"""Sums groups of 64 runs of a reduction's operands. It is given a launch of a part (`Update.parts`) and the scalar
vectors of its parameters, one in each row; it returns for each parameter a 1-D fp64 tensor for each result."""

SumRuns = Callable[[Update, Sequence[Sequence[Tensor]], Values], Sequence[Tensor]]
"""Sums the runs of a reduction's operands for a part, the components of each parameter, and the values that it reads.

For each result it returns fp64 sums: of shape [matrices, runs of 64 rows, columns] for one of columns, and else of
shape [matrices, rows, runs of 128 elements]. If there are several parameters, they are the first dimension."""

Compute = Callable[[Stage, Sequence[Tensor]], Sequence[Tensor]]
"""Computes the results of a stage of numbers, from the scalar vector's entries and the values that it reads."""

Search = Generator[tuple[Update, Values], Sequence[Tensor], tuple[dict[str, Tensor], Found]]
"""The stages before the last one: it yields what a `Reduce` is given, and is sent its results. It returns all values,
and new values of the states without a value for each element."""


class Reduced(NamedTuple):
    """A result of a reduction over rows or columns."""

    operation: object
    extent: str

    @property
    def by_columns(self) -> bool:
        """Returns True if columns are added up, and not rows."""
        return self.extent == COLUMN


def results_of(stage: Stage) -> list[Reduced]:
    """What each result of a reduction over rows or columns is."""
    return [Reduced(node.target, str(node.args[1])) for node in stage.results]


def kinds_of(stage: Stage) -> list[Any]:
    """The operation of each result of a reduction of whole tensors: `sum_of`, `mean_of` or `norm_of`."""
    return [result.target for result in stage.results]


def reductions_of(stage: Stage) -> list[Reduction]:
    """What each result of such a reduction adds up."""
    return [OF_TENSOR[kind] for kind in kinds_of(stage)]


def find(launch: Launch, sum_groups: SumGroups) -> Found:
    """Runs the stages before the last one, for all parameters of a launch; the host finishes the sums."""

    def reduced(part: Update, values: Values) -> Sequence[Tensor]:
        own, rows = given_to(part, launch, values)
        return _finished(own, sum_groups(own, rows), rows.device)

    return run(searching(launch), reduced)[1]


def find_by_rows(launch: Launch, sum_runs: SumRuns) -> tuple[dict[str, Tensor], Found]:
    """The same for reductions over rows or columns, with all values by name."""
    view = seen_view(launch)
    components = [dict(zip(launch.update.inputs, reads, strict=True)) for reads in launch.reads]

    def reduced(part: Update, values: Values) -> Sequence[Tensor]:
        runs = sum_runs(part, [[of_one[key] for key in part.inputs] for of_one in components], values)
        return [_finished_runs(r, x, view) for r, x in zip(results_of(part.stages[0]), runs, strict=True)]

    return run(searching(launch), reduced)


def run(search: Search, reduce: Reduce) -> tuple[dict[str, Tensor], Found]:
    """What a search returns, with the reductions that it needs."""
    answer: Any = None  # begins it
    while True:
        try:  # around the search alone: a StopIteration of `reduce` is not its end
            part, values = search.send(answer)
        except StopIteration as end:
            found: tuple[dict[str, Tensor], Found] = end.value
            return found
        answer = reduce(part, values)


def searching(launch: Launch, compute: Compute | None = None) -> Search:
    """The stages step by step: whoever drives it runs the reductions, and computes with numbers if torch must not."""
    update, count = launch.update, len(launch.reads)
    scalars = launch.vector.to(launch.reads[0][0].device)
    rows = scalars.expand(count, -1)
    entries = rows.unbind(1)
    if update.by_rows:  # a number that all parameters share stays 0-d: it meets values of every extent
        entries = tuple(x if x.dim() == 0 else x.reshape(-1, 1, 1, 1) for x in scalars.unbind(-1))
    values = dict[str, Tensor]()
    for name in update.reads_small:
        values[name] = torch.stack([states[name] for states in launch.small]).reshape(_shape(launch, name))
    for part in update.parts[:-1]:
        (stage,) = part.stages
        if stage.kind == REDUCTION:
            found = yield part, values
        else:
            found = (compute or _computed)(stage, [*entries, *(values[name] for name in stage.numbers)])
        if stage.kind == BETWEEN and launch.across is not None:
            found = _of_processes(stage, found, launch.across)
        values |= dict(zip(stage.reduced, found, strict=True))
    small = {
        name: values[number].expand(_shape(launch, name)).reshape(count, *launch.small[0][name].shape)
        for name, number in update.small.items()
        if number != name
    }
    return values, Found(rows if update.by_rows else _rows(rows, update.stages[-1], values), small)


def given_to(part: Update, launch: Launch, values: Values) -> tuple[Launch, Tensor]:
    """The launch of a reduction of whole tensors, which stores no components, and what it reads of each parameter."""
    places = [launch.update.inputs.index(key) for key in part.inputs]
    reads = [[components[i] for i in places] for components in launch.reads]
    own = launch._replace(update=part, reads=reads, writes=[()] * len(reads), kept=launch.kept_of(part), small=())
    scalars = launch.vector.to(launch.reads[0][0].device).expand(len(reads), -1)
    return own, _rows(scalars, part.stages[0], values)


def seen_view(launch: Launch) -> tuple[int, int, int]:
    """The matrices, rows and columns of its parameters, as the update sees them."""
    return view_of(launch.update.seen_as or launch.reads[0][0].shape)


def store_small(launch: Launch, found: Found) -> None:
    """Writes the states without a value for each element, after the last stage, unless the launch is skipped."""
    for name, values in found.small.items():
        launch.write([states[name] for states in launch.small], values.unbind())


def _computed(stage: Stage, given: Sequence[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = stage.graph(*given)
    return found


def _shape(launch: Launch, name: str) -> tuple[int, ...]:
    """That of a value; by rows, those of several parameters have four dimensions."""
    count = len(launch.reads)
    if not launch.update.by_rows:
        return (count,)
    own = shape_of(launch.update.extents.get(name, NUMBER), seen_view(launch))
    return (count, *(own or (1, 1, 1))) if count > 1 else own


def _rows(scalars: Tensor, stage: Stage, values: Values) -> Tensor:
    """The scalar vector and the numbers that a stage reads, for each parameter."""
    return torch.cat([scalars, *(values[name][:, None] for name in stage.numbers)], dim=1)


def _of_processes(stage: Stage, own: Sequence[Tensor], across: Across) -> list[Tensor]:
    """Numbers of all processes, from those of this one: in one message, where they are treated alike."""
    found = dict[int, Tensor]()
    kinds = [node.args[1:] for node in stage.results]
    for how, group in dict.fromkeys(kinds):
        places = [i for i, kind in enumerate(kinds) if kind == (how, group)]
        each = across(torch.cat([own[i] for i in places]), str(how), str(group)).split(len(own[0]))
        found |= dict(zip(places, each, strict=True))
    return [found[i] for i in range(len(kinds))]


def _finished(launch: Launch, groups: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """The numbers of a reduction from the sums of groups of each parameter, on the host."""
    of_elements = [i for i, key in enumerate(launch.update.inputs) if key not in launch.update.blocks]
    sizes = [components[of_elements[0]].numel() for components in launch.reads]
    reductions = reductions_of(launch.update.stages[0])
    found = [finish_each(r, of, sizes) for r, of in zip(reductions, zip(*groups, strict=True), strict=True)]
    return [torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32).to(device) for x in found]


def _finished_runs(result: Reduced, runs: Tensor, view: tuple[int, int, int]) -> Tensor:
    sums = folded_over(runs, -2 if result.by_columns else -1)
    terms = terms_in(view, ELEMENT, result.extent)
    return finished(ENDINGS[result.operation], sums, result.extent, terms)
