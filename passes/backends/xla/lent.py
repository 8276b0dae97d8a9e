"""Memory lent to torch_xla's CPU device: an update is made in place where nobody else refers to the old values.

A buffer of XLA may be shared without a trace: after `snapshot.copy_(p)` two tensors have one buffer, and a graph that
is not executed yet, or is being executed, reads from it later. So memory that XLA owns is only read here. A tensor that
is updated moves to memory of torch's, which XLA borrows through DLPack. Before it is written again it is taken back:
once the XLA tensor has let go of it, the tensor that XLA borrowed is alive only if something else still uses it, and
then the update works on a copy. Nothing is written that anybody can still read.
"""

from __future__ import annotations

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

    def take(self, t: Tensor) -> Tensor:
        """The values of `t` in memory that nobody else refers to. Until `give`, `t` itself has other values."""
        if not t.numel():
            return torch.empty(t.shape, dtype=t.dtype, device="cpu")
        borrowed = self._lent.get(address(t) or 0)
        if borrowed is None:
            return values(t).clone(memory_format=torch.contiguous_format)
        own, place = borrowed.detach(), borrowed.data_ptr()
        del borrowed
        t.copy_(self._substitute(t))
        return own.clone() if place in self._lent else own

    def give(self, t: Tensor, own: Tensor) -> None:
        """Makes `own` the values of `t`, without copying them. `copy_` tells autograd, and tensors that alias `t`."""
        if not own.numel():  # all empty tensors have one address, and DLPack gives them any shape
            return
        t.copy_(lend(own))
        self._lent[own.data_ptr()] = own

    def _substitute(self, t: Tensor) -> Tensor:
        """A tensor that holds the place of `t`. Nobody touches its memory, so the system never provides any."""
        key = t.shape, t.dtype
        if key not in self._substitutes:
            self._substitutes[key] = lend(torch.empty(t.shape, dtype=t.dtype, device="cpu"))
        return self._substitutes[key]


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
