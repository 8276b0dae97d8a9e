"""Memory lent to torch_xla's CPU device: an update is made in place where nobody else refers to the old values.

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
