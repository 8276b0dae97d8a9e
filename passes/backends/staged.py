"""Runs the stages of an update before its last one (`ir/stage.py`): they find the numbers that the last one reads.

These give for each parameter the numbers that its last stage reads after the scalar vector. A backend sums up the runs
of elements of a reduction (`numerics.tensor_sums`); all else is done here, alike for all. States of one number are
numbers too: read before the first stage, and stored when the last one has been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from collage_neuron.numerics.tensor_sums import OF_TENSOR, Reduction, finished
from collage_neuron.passes.backends.protocol import Across, Found, Launch
from collage_neuron.passes.ir.stage import BETWEEN, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Reduce = Callable[[Launch, Tensor], Sequence[Tensor]]
"""Runs a reduction. It is given a launch of a part (`Update.parts`) and the scalar vectors of its parameters, one in
each row; it returns for each result of the stage a 1-D fp32 tensor: a number for each parameter."""

SumGroups = Callable[[Launch, Tensor], Sequence[Sequence[Tensor]]]
"""Sums groups of 64 runs of a reduction's operands. It is given a launch of a part (`Update.parts`) and the scalar
vectors of its parameters, one in each row; it returns for each parameter a 1-D fp64 tensor for each result."""


def kinds_of(stage: Stage) -> list[Any]:
    """The operation of each result of a reduction: `sum_of`, `mean_of` or `norm_of`."""
    return [result.target for result in stage.results]


def reductions_of(stage: Stage) -> list[Reduction]:
    """What each result of a reduction adds up."""
    return [OF_TENSOR[kind] for kind in kinds_of(stage)]


def find(launch: Launch, sum_groups: SumGroups) -> Found:
    """Runs the stages before the last one, for all parameters of a launch; the host finishes the sums."""
    return find_by(launch, lambda part, rows: _finished(part, sum_groups(part, rows), rows.device))


def find_by(
    launch: Launch, reduce: Reduce, compute: Callable[[Stage, Tensor], Sequence[Tensor]] | None = None
) -> Found:
    """The same for a backend that finishes sums itself, and computes with numbers (`compute`) if torch's must not."""
    device, update = launch.reads[0][0].device, launch.update
    scalars = launch.vector.to(device).expand(len(launch.reads), -1)
    numbers = {name: torch.stack([of_one[name] for of_one in launch.small]) for name in update.reads_small}
    for part in launch.update.parts[:-1]:
        (stage,) = part.stages
        rows = _rows(scalars, stage, numbers)
        if stage.kind == REDUCTION:
            found = reduce(_launch_of(part, launch), rows)
        else:
            found = (compute or computed)(stage, rows)
        if stage.kind == BETWEEN and launch.across is not None:
            found = _of_processes(stage, found, launch.across)
        numbers |= dict(zip(stage.reduced, found, strict=True))
    small = {name: numbers[number] for name, number in update.small.items() if number != name}
    return Found(_rows(scalars, update.stages[-1], numbers), small)


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


def _rows(scalars: Tensor, stage: Stage, numbers: dict[str, Tensor]) -> Tensor:
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
    found = [finished(r, of, sizes) for r, of in zip(reductions, zip(*groups, strict=True), strict=True)]
    return [torch.tensor(x, dtype=torch.float64, device="cpu").to(torch.float32).to(device) for x in found]


def computed(stage: Stage, rows: Tensor) -> Sequence[Tensor]:
    """The numbers of a stage, by torch, from the scalar vectors and the numbers that it reads: a row a parameter."""
    found: Sequence[Tensor] = stage.graph(*rows.unbind(1))
    return found
