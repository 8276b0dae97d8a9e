"""Native code on torch_xla's CPU device: a step is one pass over memory that XLA borrows, and not HLO.

The step waits for the gradients, and so ends the graph of forward and backward. What native code cannot run, or memory
cannot be exchanged for, is run as HLO.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.xla.buffer_donation import Lender, values
from collage_neuron.passes.ir.update import Update

CPU = torch.device("cpu")


class XlaNative(Backend):
    """Runs a step of parameters on torch_xla's CPU device with a backend for CPU tensors."""

    name = "xla_native"
    devices = ("xla",)
    measures = True
    draws = True
    reshapes = True

    def __init__(self) -> None:
        self._on_cpu, self._lender = "native", Lender()

    def supports(self, update: Update) -> str | None:
        """As of HLO, which runs what native code cannot."""
        return registry.get("xla").supports(update)

    def suits(self, device: torch.device) -> bool:
        """Returns True on a CPU for which there is native code, unless tensors are sharded (SPMD)."""
        return super().suits(device) and exchanges_memory() and registry.get(self._on_cpu).suits(CPU)

    def prepare(self, device: torch.device) -> None:
        """Raises ValueError for another device than torch_xla's CPU."""
        super().prepare(device)
        if not exchanges_memory():
            raise ValueError(
                f"backend={self.name!r} runs on torch_xla's CPU device only, without SPMD; use backend='auto'"
            )
        registry.get(self._on_cpu).prepare(CPU)

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure] | None:
        """Runs a step natively if each of its updates can be, else as HLO."""
        on_cpu = registry.get(self._on_cpu)
        if not exchanges_memory() or any(on_cpu.supports(each.update) for each in launches):
            return registry.get("xla").run(launches)
        import torch_xla  # an extra: imported only where parameters are on an XLA device

        torch_xla.sync(wait=True)  # what is not computed yet has no memory
        written = {id(t): t for each in launches for tensors in each.writes for t in tensors}
        written |= {id(t): t for each in launches for states in each.small for t in states.values()}
        read = {id(t): t for each in launches for tensors in each.reads for t in tensors if id(t) not in written}
        # First, since they may be views of what is written, which has other values from now on, and to the end held.
        found = {key: values(t).contiguous() for key, t in read.items()}
        owns = self._lender.take(list(written.values()))
        found |= zip(written, owns, strict=True)
        try:
            measures = on_cpu.run([_on_cpu(each, found) for each in launches])
        finally:
            self._lender.give(list(written.values()), owns)
        device = launches[0].reads[0][0].device
        return [Measure(*(x.to(device) for x in measure)) for measure in measures or ()]


def _on_cpu(launch: Launch, found: dict[int, Tensor]) -> Launch:
    """The launch on the memory that was `found` of its tensors, by their ids."""
    named, shape = (launch.reads, launch.writes), launch.update.seen_as
    whole = {id(t): found[id(t)] for of_step in named for tensors in of_step for t in tensors}
    if shape is not None:
        whole = {key: t.view(shape) for key, t in whole.items()}
    reads, writes = ([[whole[id(t)] for t in tensors] for tensors in of_step] for of_step in named)
    finite = None if launch.finite is None else launch.finite.cpu()
    small = [{name: found[id(t)] for name, t in states.items()} for states in launch.small]
    return launch._replace(reads=reads, writes=writes, finite=finite, small=small)


def exchanges_memory() -> bool:
    """Returns True if torch_xla's device is a CPU, and each tensor has memory of its own (not with SPMD)."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    import torch_xla.runtime as xr  # an extra: imported only where parameters are on an XLA device

    return xr.device_type() == "CPU" and not xr.is_spmd()


BACKEND = XlaNative()
