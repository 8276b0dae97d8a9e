"""Prints the graph of a step whose kernel is an XLA custom call, and how many buffers its results took over.

What the Neuron plug-in does when a kernel is called on XLA tensors is played here by `custom_call`: it adds a custom
call with this target (documentation of error code EVRF015). XLA's CPU compiles the graph and has no code to run it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

import nki_standin
import torch
import torch_xla
import torch_xla.debug.metrics as met
from planned import plan
from torch import Tensor
from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # private

import collage_neuron
from collage_neuron.passes.backends.nki import custom_op
from collage_neuron.passes.backends.nki.target import TARGET
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.registry import get
from collage_neuron.states.inner_optimizers import base_of


def custom_call(key: str) -> Any:
    """The kernel as a custom call."""
    program = custom_op._programs[key]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        written = [tensors[i] for i in program.written]
        shapes, dtypes = [list(t.shape) for t in written], [t.dtype for t in written]
        return tuple(
            xlac._xla_custom_call(list(tensors), "AwsNeuronCustomNativeKernel", shapes, dtypes, False, "kernel", 1, {})
        )

    return call


def main() -> None:
    """Two parameters under SGD, their weights as pairs."""
    device = torch_xla.device()
    params = [torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in ((2, 3), (5,))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = collage_neuron.compile(torch.optim.SGD(params, lr=0.1), strategy="light")
    optimizer.step()
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    vector = torch.tensor(job.update.scalars.run(job.recording.slots), dtype=torch.float32)
    tensors = [{"param_lo": optimizer.state[p]["param_lo"], "param": p.detach(), "grad": p.grad} for p in params]
    given = [{k: t.to(device) for k, t in of_one.items()} for of_one in tensors]
    torch_xla.sync(wait=True)
    reads, writes = ([[t[k] for k in keys] for t in given] for keys in (job.update.inputs, job.update.outputs))
    get("nki").run([Launch(job.update, vector, reads, writes)])
    written = [x for of_one in writes for x in of_one]
    print(re.sub(r"IrToHlo\.\d+", "IrToHlo", xlac._get_xla_tensors_hlo(written)).strip())
    met.clear_all()
    with suppress(RuntimeError, ValueError):  # it is compiled, then cannot run
        torch_xla.sync(wait=True)
    print(f"{int(met.metric_data('InputOutputAliasCount')[1])} buffers given to the results")


if __name__ == "__main__":
    os.environ[TARGET] = "trn1"  # XLA says that its device is a CPU
    custom_op.function = custom_call  # type: ignore[assignment]
    with nki_standin.install("nki", "trn1"):
        main()
