"""Native code on torch_xla's CPU device: a step is one pass over memory that XLA borrows, and not HLO.

The step waits for the gradients, and so ends the graph of forward and backward. What native code cannot run, or memory
cannot be exchanged for, is run as HLO.

A buffer of XLA may be shared without a trace: after `snapshot.copy_(p)` two tensors have one buffer, and a graph that
is not executed yet, or is being executed, reads from it later. So memory that XLA owns is only read here. A tensor that
is updated moves to memory of torch's, which XLA borrows through DLPack. Before it is written again it is taken back:
once the XLA tensor has let go of it, the tensor that XLA borrowed is alive only if something else still uses it, and
then the update works on a copy. Nothing is written that anybody can still read.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils import dlpack

from collage_neuron import torch_privates
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.xla.backend import kind_of_devices
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
    if kind_of_devices() != "CPU":
        return False
    import torch_xla.runtime as xr  # an extra: imported only where parameters are on an XLA device

    return not xr.is_spmd()


# Memory that is lent -----------------------------------------------------------------------------------------------


class Lender:
    """Takes tensors of torch_xla's CPU device as tensors of the CPU, and gives them back."""

    def __init__(self) -> None:
        # By address. XLA alone keeps these tensors alive, and with them their entries.
        self._lent: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._substitutes: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The values of each in memory that nobody else refers to. Until `give`, the tensors have other values.

        One loop for each kind of call, here and in `give`, takes half the time of one loop with all calls.
        """
        places = [address(t) or 0 if t.numel() else 0 for t in tensors]
        owns = list(map(self._detached, places))
        lent = [(t, own) for t, own in zip(tensors, owns, strict=True) if own is not None]
        try:
            for t, _ in lent:
                t.copy_(self._substitute(t))
            last = {place: i for i, place in enumerate(places)}  # of tensors with one memory, only one may have it
            return [
                _copied(t) if own is None else own.clone() if place in self._lent or last[place] > i else own
                for i, (t, own, place) in enumerate(zip(tensors, owns, places, strict=True))
            ]
        except BaseException:
            self.give([t for t, _ in lent], [own for _, own in lent])
            raise

    def _detached(self, place: int) -> Tensor | None:
        """The memory at an address, if it is lent. It must not be held as the object that was lent."""
        borrowed = self._lent.get(place)
        return None if borrowed is None else borrowed.detach()

    def give(self, tensors: Sequence[Tensor], owns: Sequence[Tensor]) -> None:
        """Makes `owns` the values of the tensors, uncopied. `copy_` tells autograd, and tensors that alias them."""
        lent = [lend(own) if own.numel() else None for own in owns]  # empty ones have one address, and any shape
        for t, one in zip(tensors, lent, strict=True):
            if one is not None:
                t.copy_(one)
        self._lent.update({own.data_ptr(): own for own in owns if own.numel()})

    def _substitute(self, t: Tensor) -> Tensor:
        """A tensor that holds the place of `t`. Nobody touches its memory, so the system never provides any."""
        key = t.shape, t.dtype
        if key not in self._substitutes:
            self._substitutes[key] = lend(torch.empty(t.shape, dtype=t.dtype, device="cpu"))
        return self._substitutes[key]


def _copied(t: Tensor) -> Tensor:
    if not t.numel():
        return torch.empty(t.shape, dtype=t.dtype, device="cpu")
    return values(t).clone(memory_format=torch.contiguous_format)


def address(t: Tensor) -> int | None:
    """Where the values of `t` are; None while they are not computed, or are in several places (SPMD)."""
    try:
        return torch_privates.xla_address(t)
    except RuntimeError:
        return None


def values(t: Tensor) -> Tensor:
    """The values of `t`, to be read: its own memory if it has any."""
    if not address(t):  # `to_dlpack` would end the process
        return t.detach().cpu()
    from torch_xla.utils.dlpack import to_dlpack  # an extra: imported only where parameters are on an XLA device

    memory: Tensor = dlpack.from_dlpack(to_dlpack(t))
    return memory


def lend(own: Tensor) -> Tensor:
    """An XLA tensor whose memory is that of `own`, which must not be written until XLA has let go of it."""
    from torch_xla.utils.dlpack import from_dlpack  # an extra: imported only where parameters are on an XLA device

    lent: Tensor = from_dlpack(own.__dlpack__())
    return lent


BACKEND = XlaNative()
