"""Runs the stages of an update before its last one: they find the numbers that the last one reads.

Given (LAMB)::

    stage 0, reduction:    param, grad -> reduced0, reduced1
    stage 1, numbers:      reduced0, reduced1 -> number0
    stage 2, elementwise:  param, grad, number0 -> param

stages 0 and 1 give for each parameter the numbers that its last stage reads after the scalar vector. A backend sums up
the runs of elements of a reduction (`numerics.tensor_sums`); all else is done here, alike for all. States of one number
are numbers too: read before the first stage, and stored when the last one has been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collage_neuron.numerics.tensor_sums import OF_TENSOR, Reduction, finished
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

SumRuns = Callable[[Launch, Tensor], Sequence[Sequence[Tensor]]]
"""Sums the runs of a reduction's operands. It is given a launch of a part (`Update.parts`) and the scalar vectors of
its parameters, one in each row; it returns for each parameter a 1-D fp64 tensor for each result of the stage."""


def reductions_of(stage: Stage) -> list[Reduction]:
    """What each result of a reduction adds up."""
    (results,) = next(n for n in reversed(stage.body.nodes) if n.op == "output").args
    assert isinstance(results, tuple)
    return [OF_TENSOR[result.target] for result in results]


def find(launch: Launch, sum_runs: SumRuns) -> Found:
    """Runs the stages before the last one, for all parameters of a launch."""
    device, update = launch.reads[0][0].device, launch.update
    scalars = launch.vector.to(device).expand(len(launch.reads), -1)
    numbers = {name: torch.stack([of_one[name] for of_one in launch.small]) for name in update.reads_small}
    for part in launch.update.parts[:-1]:
        (stage,) = part.stages
        rows = _rows(scalars, stage, numbers)
        found = _reduced(launch, part, rows, sum_runs) if stage.kind == REDUCTION else _computed(stage, rows)
        numbers |= dict(zip((r.name for r in stage.reduced), found, strict=True))
    small = {name: numbers[number] for name, number in update.small.items() if number != name}
    return Found(_rows(scalars, update.stages[-1], numbers), small)


def store_small(launch: Launch, found: Found) -> None:
    """Writes the states of one number, after the last stage has been run, unless the launch is skipped."""
    for name, values in found.small.items():
        for state, new in zip(launch.small, values.unbind(), strict=True):
            old = state[name]
            old.copy_(new if launch.finite is None else torch.where(launch.finite.to(old.device), new, old))


def _rows(scalars: Tensor, stage: Stage, numbers: dict[str, Tensor]) -> Tensor:
    """The scalar vector and the numbers that a stage reads, for each parameter."""
    return torch.cat([scalars, *(numbers[name][:, None] for name in stage.numbers)], dim=1)


def _reduced(launch: Launch, part: Update, rows: Tensor, sum_runs: SumRuns) -> list[Tensor]:
    places = [launch.update.inputs.index(key) for key in part.inputs]
    reads = [[components[i] for i in places] for components in launch.reads]
    runs = sum_runs(launch._replace(update=part, reads=reads, writes=[()] * len(reads), kept=None), rows)
    sizes = [components[0].numel() for components in launch.reads]
    found = [
        finished(r, of, sizes) for r, of in zip(reductions_of(part.stages[0]), zip(*runs, strict=True), strict=True)
    ]
    return [torch.tensor(x, dtype=torch.float64).to(torch.float32).to(rows.device) for x in found]


def _computed(stage: Stage, rows: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = stage.graph(*rows.unbind(1))
    return found
