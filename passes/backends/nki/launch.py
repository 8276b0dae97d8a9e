"""The NKI backend's step: the kernels of all parameters as one (`calls.py`), after the stages that find numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from collage_neuron.passes.backends.nki.calls import call, parts_of, shape_of
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.measured import measure_of, nothing
from collage_neuron.passes.backends.nki.target import machine_of
from collage_neuron.passes.backends.protocol import Found, Launch, Measure


class Result(NamedTuple):
    """What a step makes of one parameter."""

    components: Sequence[Tensor]
    """The new ones, in the order of `update.outputs`."""
    measure: Measure | None
    """Its measurements, if its update measures itself."""


def run_step(launches: Sequence[Launch], found: Sequence[Found | None] = ()) -> Iterator[Result]:
    """What a step makes of every parameter, in order; writes none.

    `found` is what the stages before the last one have found for each launch (`stages.found_of`), if any has such.

    Raises:
        UnsupportedUpdate: an update has an operation for which there is no instruction.
        UnsafeEnvironment: no NKI is installed that can run kernels on the device of the parameters.
    """
    machine = machine_of(launches[0].reads[0][0].device)
    launches = [launch._replace(update=launch.update.parts[-1]) for launch in launches]
    parts = [part for i, launch in enumerate(launches) for part in parts_of(i, launch, machine)]
    present = [part for part in parts if part.tensors[0].numel()]  # an empty tensor has nothing to update
    rows = [None if numbers is None else numbers.rows for numbers in found]
    results = call(launches, present, machine, rows) if present else iter(())
    for part, old in zip(parts, (reads for launch in launches for reads in launch.reads), strict=True):
        update = launches[part.launch].update
        known = dict(zip(update.inputs, old, strict=True))  # what a kernel leaves alone stays what it is
        known |= zip((a.key for a in part.kernel.arguments), part.tensors, strict=True)
        measure = nothing(update, part.tensors[0].device) if update.sums else None
        if part.tensors[0].numel():
            known |= zip(part.kernel.outputs, next(results), strict=True)
            measure = measure_of(update, known[MEASURES]) if update.sums else None
        yield Result([known[key].view(shape_of(update, key, old[0])) for key in update.outputs], measure)
