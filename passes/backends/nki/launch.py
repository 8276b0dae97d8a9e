"""The NKI backend's step: the kernels of all parameters as one (`calls.py`), after the stages that find numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from collage_neuron.passes.backends.nki.calls import call, parts_of
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.measured import measure_of, nothing
from collage_neuron.passes.backends.nki.target import machine_of
from collage_neuron.passes.backends.protocol import Launch, Measure


class Result(NamedTuple):
    """What a step makes of one parameter."""

    components: Sequence[Tensor]
    """The new ones, in the order of `update.outputs`; a tensor of `launch.writes` itself has its new value already."""
    measure: Measure | None
    """Its measurements, if its update measures itself."""


def run_step(launches: Sequence[Launch], rows: Sequence[Tensor | None] = ()) -> Iterator[Result]:
    """What a step makes of every parameter, in order; writes none, but where kernels work in place.

    Updates are of one elementwise stage. `rows` are, for each launch, None or the scalar vectors of its parameters with
    what earlier stages have found (`stages.before_of`).

    Raises:
        UnsupportedUpdate: an update has an operation for which there is no instruction.
        UnsafeEnvironment: no NKI is installed that can run kernels on the device of the parameters.
    """
    machine = machine_of(launches[0].reads[0][0].device)
    parts = [part for i, launch in enumerate(launches) for part in parts_of(i, launch, machine)]
    present = [part for part in parts if part.tensors[0].numel()]  # an empty tensor has nothing to update
    results = call(launches, present, machine, rows) if present else iter(())
    of_parameters = ((x, y) for launch in launches for x, y in zip(launch.reads, launch.writes, strict=True))
    for part, (old, writes) in zip(parts, of_parameters, strict=True):
        update = launches[part.launch].update
        known = dict(zip(update.inputs, old, strict=True))  # what a kernel leaves alone stays what it is
        known |= zip((a.key for a in part.kernel.arguments), part.tensors, strict=True)
        measure = nothing(update, part.tensors[0].device) if update.sums else None
        if part.tensors[0].numel():
            known |= zip(part.kernel.outputs, next(results), strict=True)
            measure = measure_of(update, known[MEASURES]) if update.sums else None
        new = [
            x if key in part.stored else known[key].reshape(x.shape)
            for key, x in zip(update.outputs, writes, strict=True)
        ]
        yield Result(new, measure)
