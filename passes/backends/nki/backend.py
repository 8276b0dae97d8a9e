"""The NKI backend: a step is one generated kernel for Trainium, after one for each reduction over parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from collage_neuron.passes.backends import torch_neuron
from collage_neuron.passes.backends.nki.calls import call, parts_of
from collage_neuron.passes.backends.nki.chunk_totals import measure_of
from collage_neuron.passes.backends.nki.custom_op import in_place_operator, works_in_place
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import LAYOUTS, reason_against
from collage_neuron.passes.backends.nki.stages import before_of
from collage_neuron.passes.backends.nki.target import advised, installed, is_trainium, machine_of
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.staged import store_small
from collage_neuron.passes.backends.xla.backend import open_device
from collage_neuron.passes.ir.update import Update


def run_step(
    launches: Sequence[Launch], rows: Sequence[Tensor | None] = ()
) -> Iterator[tuple[Sequence[Tensor], Measure | None]]:
    """What a step makes of every parameter, in order; writes none, but where kernels work in place.

    That is its new components, in the order of `update.outputs`, of which a tensor of `launch.writes` itself has its
    new value already; and its measurements, if its update measures itself.

    Updates are of one elementwise stage. `rows` are, for each launch, None or the scalar vectors of its parameters with
    what earlier stages have found (`stages.before_of`).

    Raises:
        UnsupportedUpdate: an update has an operation for which there is no instruction.
        UnsafeEnvironment: no NKI is installed that can run kernels on the device of the parameters.
    """
    machine = machine_of(launches[0].reads[0][0].device)
    parts = [part for i, launch in enumerate(launches) for part in parts_of(i, launch, machine)]
    of_parameters = ((x, y) for launch in launches for x, y in zip(launch.reads, launch.writes, strict=True))
    results = call(launches, parts, machine, rows)
    for part, found, (old, writes) in zip(parts, results, of_parameters, strict=True):
        update = launches[part.launch].update
        known = dict(zip(update.inputs, old, strict=True)) | found  # what a kernel leaves alone stays what it is
        new = [
            x if key in part.stored else known[key].reshape(x.shape)
            for key, x in zip(update.outputs, writes, strict=True)
        ]
        yield new, measure_of(update, found[MEASURES]) if update.sums else None


class Nki(Backend):
    """Runs a step as one kernel: on Trainium, or on CPU tensors in the simulator of NKI."""

    name = "nki"
    devices = ("neuron", "xla", "cpu")
    layouts = LAYOUTS
    measures = True
    reduces = True
    sees_as = True
    reshapes = True  # a kernel takes tensors of any shape, as they lie in memory
    draws = True
    largest = 2.0**30  # reciprocals are documented up to 2**42, and a divisor is about as large as a gradient
    domains = (
        "A device may drop a number that an instruction should add, such as eps (a trn1 did, aws-neuron-sdk#1296): "
        "`python -m collage_neuron doctor` asks it. And kernels for Trainium clamp divisors to 2**-42 (2.3e-13) and "
        "2**42 (4.4e12), and operands of square roots to 2**-116 and 2**118, so that no root is 0: if gradients or eps "
        "are outside, use a larger eps, scale the loss, or take backend='xla'; validate=\"off\" would only hide it "
        "(docs/kernels.md, What is exact)"
    )

    def supports(self, update: Update) -> str | None:
        """Why no kernel is generated for `update`; the operations it has are asked for when it runs."""
        return reason_against(update)

    def suits(self, device: torch.device) -> bool:
        """Returns True for a Trainium, if an NKI is installed or there is no other way to run there."""
        return is_trainium(device)

    def prepare(self, device: torch.device) -> None:
        """Raises NoMachine, a ValueError, where kernels cannot run."""
        super().prepare(device)
        machine_of(device)
        if works_in_place(device):
            in_place_operator()

    def advised(self, text: str, device: torch.device) -> str:
        """Names what there is instead of kernels."""
        return advised(text, device)

    def converter(self, device: torch.device) -> Backend:
        """Not a kernel: formats that no kernel has are converted too, and trn1 takes one kernel in a graph."""
        return get("xla" if device.type == "xla" else "reference")

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """TorchNeuron's device, or torch_xla's where Neuron's plug-in for it is installed, if there is an NKI."""
        if torch_neuron.is_installed() and installed() is not None:
            yield torch_neuron.open_device
        elif importlib.util.find_spec("libneuronxla") is not None and installed() is not None:
            yield open_device

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        """Calls the kernel, then writes its results if it returns some (`custom_op`).

        On XLA `copy_` gives the kernel the buffers of what it updates.
        """
        before = before_of(launches)
        results, measured = run_step([x.last for x in before], [x.rows for x in before]), []
        for launch, done in zip(launches, before, strict=True):
            for writes in launch.writes:
                components, measure = next(results)
                launch.write(writes, components)
                measured += [measure] if measure is not None else []
            for part, found in done.stored:
                store_small(part, found)
        return measured


BACKEND = Nki()
