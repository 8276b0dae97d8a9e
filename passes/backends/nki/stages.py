"""The stages before the last one on Trainium: kernels that add up, and torch's operations on a number a parameter.

Given (LAMB)::

    stage 0, reduction:    param, grad -> reduced0, reduced1
    stage 1, numbers:      reduced0, reduced1 -> number0
    stage 2, elementwise:  param, grad, number0 -> param

Result: one kernel for stage 0, of all parameters of a launch, which leaves sums of each chunk (`chunk_sums.py`); these
are put together, and stage 1 computed, by operations on small tensors of the device, in fp32; the kernel of stage 2
reads its numbers with those of the step. The host waits for none of it.

Trn1 takes one kernel in a graph (`calls.py`), so on XLA the graph ends after each kernel of a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from collage_neuron.passes.backends.nki.calls import call, end_graph, parts_of
from collage_neuron.passes.backends.nki.chunk_totals import nothing_of, sums_of
from collage_neuron.passes.backends.nki.numbers import computed
from collage_neuron.passes.backends.nki.rows import Before, before_last
from collage_neuron.passes.backends.nki.target import Machine, machine_of
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.backends.staged import find_by, kinds_of
from collage_neuron.passes.ir.stage import Stage


def before_of(launches: Sequence[Launch]) -> list[Before]:
    """Runs the stages before the last one of each launch, if it has any."""
    by_rows = [launch for launch in launches if launch.update.by_rows and launch.reads]
    done = iter(before_last(by_rows, machine_of(by_rows[0].reads[0][0].device)) if by_rows else ())
    return [next(done) if launch.update.by_rows and launch.reads else _before(launch) for launch in launches]


def _before(launch: Launch) -> Before:
    if not launch.update.is_staged or not launch.reads:
        return Before(launch)
    found = _found(launch, machine_of(launch.reads[0][0].device))
    return Before(launch._replace(update=launch.update.parts[-1]), found.rows, [(launch, found)])


def _found(launch: Launch, machine: Machine) -> Found:
    """What the stages before the last one find for the parameters of a launch."""
    return find_by(launch, lambda part, rows: _reduced(part, rows, machine), _computed)


def _computed(stage: Stage, rows: Tensor) -> Sequence[Tensor]:
    return computed(stage, rows.unbind(1))


def _reduced(launch: Launch, rows: Tensor, machine: Machine) -> list[Tensor]:
    """The numbers of a reduction, for all parameters of its launch."""
    kinds = kinds_of(launch.update.stages[0])
    parts = list(parts_of(0, launch, machine))
    present = [part for part in parts if part.tensors[0].numel()]
    groups: dict[Any, list[tuple[int, Tensor]]] = {}
    for part, (totals,) in zip(present, call([launch], present, machine, [rows]) if present else (), strict=True):
        groups.setdefault((part.kernel, tuple(part.shape)), []).append((part.parameter, totals))
    end_graph(rows.device, machine)
    empty = torch.tensor(list(map(nothing_of, kinds)), dtype=torch.float32, device="cpu").to(rows.device)
    found = dict.fromkeys((part.parameter for part in parts), empty)
    for (kernel, shape), of_one in groups.items():
        numbers = sums_of(kernel.plan.program, kinds, torch.stack([t for _, t in of_one]), torch.Size(shape).numel())
        found |= zip((place for place, _ in of_one), numbers.unbind(), strict=True)
    return list(torch.stack([found[k] for k in range(len(parts))]).unbind(1))
