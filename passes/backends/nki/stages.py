"""The stages before the last one on Trainium: kernels that add up, and torch's operations on a number a parameter.

Given: the stages of LAMB (`ir/stage.py`)

Result: one kernel for stage 0, of all parameters of a launch, which leaves sums of each chunk (`chunk_sums.py`); these
are put together, and stage 1 computed, by operations on small tensors of the device, in fp32; the kernel of stage 2
reads its numbers with those of the step. The host waits for none of it.

Trn1 takes one kernel in a graph (`calls.py`), so on XLA the graph ends after each kernel of a reduction.

Given (Adafactor, of parameters of two shapes)::

    stage 0, reduction:    grad -> reduced0, reduced1              (means of rows and columns of squares)
    stage 1, numbers:      row, col, reduced0, reduced1 -> number0, number1
    stage 2, elementwise:  param, grad, number0, number1 -> param

Result: a kernel of all parameters that stores squares (`lower.elements_of`), one that adds up their rows and columns
and operations on small tensors for stage 1 (`chunk_totals.py`), and a launch of stage 2 in which these are operands.
Parameters of one shape are worked on together, and all shapes and launches in step with each other: a step has as many
kernels as its longest update needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.reductions import OF_TENSOR
from collage_neuron.passes.backends import staged
from collage_neuron.passes.backends.nki.calls import call, end_graph, parts_of
from collage_neuron.passes.backends.nki.chunk_totals import Wanted, computed, sums_for, sums_of
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import elements_of, operands_of
from collage_neuron.passes.backends.nki.target import Machine, machine_of
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.backends.staged import Search, Values, given_to, kinds_of, results_of, searching, seen_view
from collage_neuron.passes.ir.update import Update


class Before(NamedTuple):
    """What the stages before the last one of a launch leave."""

    last: Launch
    """Of the last stage: an elementwise update."""
    rows: Tensor | None = None
    """The scalar vectors of its parameters, with the numbers that it reads; None if it reads none."""
    stored: Sequence[tuple[Launch, Found]] = ()
    """What is stored after it, of some of the parameters."""


class _Alike:
    """The parameters of one shape of a launch."""

    def __init__(self, launch: Launch, places: Sequence[int]) -> None:
        self.places, self.launch = places, launch.part(places)
        self.search: Search = searching(self.launch, computed)
        self.values: Values = {}
        self.found = Found(launch.vector[None], {})

    def ask(self, answer: Sequence[Tensor] | None = None) -> None:
        """Finds the reduction that it needs next (`part`), given the results of the one before; None at the end."""
        self.part: Update | None = None
        try:
            self.part, self.values = self.search.send(answer)  # type: ignore[arg-type]  # None begins
        except StopIteration as end:
            self.values, self.found = end.value

    def elements(self, part: Update) -> tuple[Launch, Tensor]:
        """The launch of the elementwise part of a stage, and its scalar vectors with the numbers that it reads."""
        update, (stage,) = elements_of(part), part.stages
        view, count = seen_view(self.launch), len(self.places)
        spread = [self.values[name].expand(count, *view) for name in update.inputs[len(stage.inputs) :]]
        reads = []
        for i, given in enumerate(self.launch.reads):
            known = dict(zip(self.launch.update.inputs, given, strict=True))
            reads.append([*(known[key] for key in stage.inputs), *(x[i].reshape(given[0].shape) for x in spread)])
        vector = self.launch.vector.to(reads[0][0].device).expand(count, -1)
        numbers = [self.values[name].reshape(-1).expand(count)[:, None] for name in update.stages[0].numbers]
        own = self.launch._replace(update=update, reads=reads, writes=[()] * count, small=())
        return own, torch.cat([vector, *numbers], dim=1)


def _alike(launch: Launch) -> list[_Alike]:
    places: dict[tuple[int, ...], list[int]] = {}
    for i, reads in enumerate(launch.reads):
        places.setdefault(tuple(reads[0].shape), []).append(i)
    return [_Alike(launch, of_one_shape) for of_one_shape in places.values()]


def before_last(launches: Sequence[Launch], machine: Machine) -> list[Before]:
    """Runs the stages before the last ones of updates by rows, of all launches in step with each other."""
    alike = [_alike(launch) for launch in launches]
    groups = [group for of_launch in alike for group in of_launch]
    for group in groups:
        group.ask()
    # One call of kernels for all groups: each call is a graph of its own on trn1.
    while active := [(group, group.part) for group in groups if group.part is not None]:
        for (group, _), answer in zip(active, _answers(active, machine), strict=True):
            group.ask(answer)
    return [_before_by_rows(launch, of_launch) for launch, of_launch in zip(launches, alike, strict=True)]


def _before_by_rows(launch: Launch, groups: Sequence[_Alike]) -> Before:
    found: dict[int, tuple[Sequence[Tensor], Tensor]] = {}
    for group in groups:
        own, vectors = group.elements(launch.update.parts[-1])
        found |= zip(group.places, zip(own.reads, vectors.unbind(), strict=True), strict=True)
    reads, rows = zip(*(found[i] for i in range(len(found))), strict=True)
    last = launch._replace(update=elements_of(launch.update.parts[-1]), reads=reads, small=(), kept=None)
    return Before(last, torch.stack(rows), [(group.launch, group.found) for group in groups])


def _answers(active: Sequence[tuple[_Alike, Update]], machine: Machine) -> list[list[Tensor]]:
    """The results of a reduction of each group."""
    made = [group.elements(part) for group, part in active]
    stored = _stored(made, machine)
    known = []
    for (group, part), (own, _), more in zip(active, made, stored, strict=True):
        view, (stage,) = seen_view(group.launch), part.stages
        components = [dict(zip(own.update.inputs, own.masked(reads), strict=True)) for reads in own.reads]
        operands = [of_one | new for of_one, new in zip(components, more, strict=True)]
        known += [
            Wanted(result.operation, result.extent, [_shaped(of_one[key], view) for of_one in operands])
            for result, key in zip(results_of(stage), operands_of(stage), strict=True)
        ]
    found = iter(sums_for(known, machine))
    # Trn1 takes one kernel in a graph (aws-neuron-sdk#1311), and each reduction is one.
    end_graph(made[0][1].device)
    return [[next(found) for _ in part.stages[0].reduced] for _, part in active]


def _shaped(x: Tensor, view: tuple[int, int, int]) -> Tensor:
    x = x.detach().reshape(view)
    # Kernels of sums are made for these two types (`chunk_totals.kernel_for`).
    return x if x.dtype in (torch.float32, torch.bfloat16) else x.to(torch.float32)


def _stored(made: Sequence[tuple[Launch, Tensor]], machine: Machine) -> list[list[dict[str, Tensor]]]:
    """What the kernels of elements store, by launch, parameter and key."""
    launches, rows = [own for own, _ in made], [vectors for _, vectors in made]
    parts = [part for i, own in enumerate(launches) if own.update.outputs for part in parts_of(i, own, machine)]
    known: list[list[dict[str, Tensor]]] = [[{} for _ in own.reads] for own in launches]
    for part, found in zip(parts, call(launches, parts, machine, rows), strict=True):
        known[part.launch][part.parameter] = {key: found[key] for key in part.kernel.outputs}
    if not all(part.is_empty for part in parts):
        end_graph(rows[0].device)
    return known


def before_of(launches: Sequence[Launch]) -> list[Before]:
    """Runs the stages before the last one of each launch, if it has any."""
    by_rows = [launch for launch in launches if launch.update.by_rows and launch.reads]
    done = iter(before_last(by_rows, machine_of(by_rows[0].reads[0][0].device)) if by_rows else ())
    return [next(done) if launch.update.by_rows and launch.reads else _before(launch) for launch in launches]


def _before(launch: Launch) -> Before:
    if not launch.update.is_staged or not launch.reads:
        return Before(launch)
    machine = machine_of(launch.reads[0][0].device)

    def reduced(part: Update, values: Values) -> list[Tensor]:
        return _reduced(*given_to(part, launch, values), machine)

    _, found = staged.run(searching(launch, computed), reduced)
    return Before(launch._replace(update=launch.update.parts[-1]), found.rows, [(launch, found)])


def _reduced(launch: Launch, rows: Tensor, machine: Machine) -> list[Tensor]:
    """The numbers of a reduction, for all parameters of its launch."""
    kinds, parts = kinds_of(launch.update.stages[0]), list(parts_of(0, launch, machine))
    groups: dict[Any, list[tuple[int, Tensor]]] = {}
    for part, known in zip(parts, call([launch], parts, machine, [rows]), strict=True):
        if not part.is_empty:
            groups.setdefault((part.kernel, part.shape), []).append((part.parameter, known[MEASURES]))
    end_graph(rows.device)
    # No kernel runs on a parameter without elements: its results are those of a sum of nothing.
    of_nothing = [OF_TENSOR[kind].finish(0.0, 0) for kind in kinds]
    empty = torch.tensor(of_nothing, dtype=torch.float32, device="cpu").to(rows.device)
    found = dict.fromkeys(range(len(parts)), empty)
    for (kernel, shape), of_one in groups.items():
        numbers = sums_of(kernel.plan.program, kinds, torch.stack([t for _, t in of_one]), math.prod(shape))
        found |= zip((place for place, _ in of_one), numbers.unbind(), strict=True)
    return list(torch.stack([*found.values()]).unbind(1))
