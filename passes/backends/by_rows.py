"""Runs the stages of updates with reductions over rows or columns (`numerics.matrix_sums`), for equal shapes at once.

Given (a second moment of rows, as Adafactor has it)::

    stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
    stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0     (the new state, a value for each row)
    stage 2, elementwise:  param, grad, number0 -> param

a backend adds up the runs of elements of stage 0, and runs stage 2. What is between is done here, alike for all: values
of rows have the shape [matrices, rows, 1], those of columns [matrices, 1, columns], so that they broadcast. Several
parameters of one shape are a dimension before these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.matrix_sums import (
    COLUMN,
    ELEMENT,
    ENDINGS,
    NUMBER,
    finished,
    shape_of,
    terms_in,
    view_of,
)
from collage_neuron.numerics.tensor_sums import folded_over
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Values = Mapping[str, Tensor]
"""Values of rows, columns and matrices, and numbers, by name."""

SumRuns = Callable[[Update, Sequence[Sequence[Tensor]], Values], Sequence[Tensor]]
"""Sums the runs of a reduction's operands for a part (`Update.parts`), the components of each parameter, and the values
that it reads.

For each result it returns fp64 sums: of shape [matrices, runs of 64 rows, columns] for one of columns, and else of
shape [matrices, rows, runs of 128 elements]. If there are several parameters, they are the first dimension."""

Compute = Callable[[Stage, Sequence[Tensor]], Sequence[Tensor]]
"""Computes the results of a stage of numbers, from the scalar vector's entries and the values that it reads."""

Search = Generator[tuple[Update, Values], Sequence[Tensor], tuple[dict[str, Tensor], Found]]
"""The stages before the last one. It yields a reduction's part, and the values that are known; it is sent its results,
in fp32: of the shape of their extent, after a dimension for parameters if there are several. It returns what `find`
does."""


class Reduced(NamedTuple):
    """A result of a reduction stage."""

    operation: object
    extent: str

    @property
    def by_columns(self) -> bool:
        """Returns True if columns are added up, and not rows."""
        return self.extent == COLUMN


def results_of(stage: Stage) -> list[Reduced]:
    """What each result of a reduction stage is."""
    return [Reduced(node.target, str(node.args[1])) for node in stage.results]


def find(launch: Launch, sum_runs: SumRuns) -> tuple[dict[str, Tensor], Found]:
    """Runs the stages before the last one for the parameters of a launch, which have one shape.

    Returns all values by name, and new values of the states without a value for each element.
    """
    view = seen_view(launch)
    components = [dict(zip(launch.update.inputs, reads, strict=True)) for reads in launch.reads]

    def results(part: Update, values: Values) -> list[Tensor]:
        runs = sum_runs(part, [[of_one[key] for key in part.inputs] for of_one in components], values)
        return [_finished(r, x, view) for r, x in zip(results_of(part.stages[0]), runs, strict=True)]

    search, answer = searching(launch), None
    try:
        while True:
            answer = results(*search.send(answer))  # type: ignore[arg-type]  # None begins
    except StopIteration as end:
        found: tuple[dict[str, Tensor], Found] = end.value
        return found


def searching(launch: Launch, compute: Compute | None = None) -> Search:
    """The same step by step: whoever drives it runs the reductions, and computes with numbers if torch must not."""
    update, view, compute = launch.update, seen_view(launch), compute or _computed
    lead = (len(launch.reads),) if len(launch.reads) > 1 else ()
    scalars = launch.vector.to(launch.reads[0][0].device)
    entries = [x if x.dim() == 0 else x.reshape(-1, 1, 1, 1) for x in scalars.unbind(-1)]
    values = dict[str, Tensor]()
    for name in update.reads_small:
        shape = _shape(update, name, view, lead)
        values[name] = torch.stack([states[name] for states in launch.small]).reshape(shape)
    for part in update.parts[:-1]:
        (stage,) = part.stages
        if stage.kind == REDUCTION:
            found = yield part, values
        else:
            found = compute(stage, [*entries, *(values[name] for name in stage.numbers)])
        values |= dict(zip(stage.reduced, found, strict=True))
    small = {
        name: values[number]
        .expand(_shape(update, name, view, lead))
        .reshape(len(launch.reads), *launch.small[0][name].shape)
        for name, number in update.small.items()
        if number != name
    }
    return values, Found(scalars.expand(len(launch.reads), -1), small)


def seen_view(launch: Launch) -> tuple[int, int, int]:
    """The matrices, rows and columns of its parameters, as the update sees them."""
    return view_of(launch.update.seen_as or launch.reads[0][0].shape)


def _computed(stage: Stage, given: Sequence[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = stage.graph(*given)
    return found


def _shape(update: Update, name: str, view: tuple[int, int, int], lead: tuple[int, ...]) -> tuple[int, ...]:
    """That of a value; of several parameters, one after another in the first dimension, all have four dimensions."""
    own = shape_of(update.extents.get(name, NUMBER), view)
    return (*lead, *(own or (1, 1, 1))) if lead else own


def _finished(result: Reduced, runs: Tensor, view: tuple[int, int, int]) -> Tensor:
    sums = folded_over(runs, -2 if result.by_columns else -1)
    return finished(ENDINGS[result.operation], sums, result.extent, terms_in(view, ELEMENT, result.extent))
