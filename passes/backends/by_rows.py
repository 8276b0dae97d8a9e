"""Runs the stages of an update with reductions over rows or columns (`numerics.matrix_sums`), one parameter at a time.

Given (a second moment of rows, as Adafactor has it)::

    stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
    stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0     (the new state, a value for each row)
    stage 2, elementwise:  param, grad, number0 -> param

a backend adds up the runs of elements of stage 0, and runs stage 2. What is between is done here, alike for all: values
of rows have the shape [matrices, rows, 1], those of columns [matrices, 1, columns], so that they broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from collage_neuron.numerics.matrix_sums import (
    COLUMN,
    ELEMENT,
    ENDINGS,
    NUMBER,
    finished,
    folded_over,
    shape_of,
    terms_in,
    view_of,
)
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Values = Mapping[str, Tensor]
"""Values of rows, columns and matrices, and numbers, by name."""

SumRuns = Callable[[Update, Sequence[Tensor], Values], Sequence[Tensor]]
"""Sums the runs of a reduction's operands for a part (`Update.parts`), its components, and the values that it reads.

For each result it returns fp64 sums: of shape [matrices, runs of 64 rows, columns] for one of columns, and else of
shape [matrices, rows, runs of 128 elements]."""


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
    (results,) = next(n for n in reversed(stage.body.nodes) if n.op == "output").args
    assert isinstance(results, tuple)
    return [Reduced(node.target, node.args[1]) for node in results]


def find(launch: Launch, sum_runs: SumRuns) -> tuple[dict[str, Tensor], Found]:
    """Runs the stages before the last one for the one parameter of a launch.

    Returns all values by name, and new values of the states without a value for each element.
    """
    update, ((first, *others), states) = launch.update, (launch.reads[0], (*launch.small, {})[0])
    components = dict(zip(update.inputs, (first, *others), strict=True))
    view, extents = view_of(first.shape), update.extents
    scalars = launch.vector.to(first.device)
    values = {
        name: states[name].reshape(shape_of(extents.get(name, NUMBER), view)).clone() for name in update.reads_small
    }
    for part in update.parts[:-1]:
        (stage,) = part.stages
        if stage.kind == REDUCTION:
            runs = sum_runs(part, [components[key] for key in part.inputs], values)
            found = [_finished(r, x, view) for r, x in zip(results_of(stage), runs, strict=True)]
        else:
            found = stage.graph(*scalars.unbind(), *(values[name] for name in stage.numbers))
        values |= dict(zip((r.name for r in stage.reduced), found, strict=True))
    small = {
        name: values[number].expand(shape_of(extents.get(name, NUMBER), view)).reshape(1, *states[name].shape)
        for name, number in update.small.items()
        if number != name
    }
    return values, Found(scalars[None], small)


def _finished(result: Reduced, runs: Tensor, view: tuple[int, int, int]) -> Tensor:
    sums = folded_over(runs, 1 if result.by_columns else 2)
    return finished(ENDINGS[result.operation], sums, result.extent, terms_in(view, ELEMENT, result.extent))
