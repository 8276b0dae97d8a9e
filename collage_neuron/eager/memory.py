"""Memory of the fp32 values, which the system may take back between steps, and need not give again if it does not.

Large tensors that come and go in every step cost more than the conversion: in pages of 4 KiB, 64 MiB take 17 ms (7 ms
of copying), and what is freed makes the C library return memory that the user's own `step()` has to fetch again. So
tensors of a MiB or more lie in memory of their own, in large pages where there are some, which after the step is marked
as free (`MADV_FREE`): it counts as the process's until another one needs memory, and then the system takes it without
asking. The next step writes it anew.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 20
"""Bytes from which a tensor has memory of its own."""
LARGE = 1 << 21
"""Bytes of a large page."""

IS_KNOWN = hasattr(mmap, "MADV_FREE") and hasattr(mmap, "MADV_HUGEPAGE")
"""True where the system has both: on Linux."""


@dataclass
class Region:
    """Memory for one tensor at a time."""

    memory: mmap.mmap
    offset: int
    length: int
    lease: weakref.ref[Any]
    """What the storage of the tensor keeps alive; dead if there is none."""

    @classmethod
    def of(cls, length: int) -> Region:
        """A new region; it is aligned to large pages if it has whole ones."""
        aligned = length >= LARGE
        memory = mmap.mmap(-1, length + LARGE * aligned, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE if aligned else 0
        if aligned:
            _advised(memory, mmap.MADV_HUGEPAGE, offset, length)
        return cls(memory, offset, length, lambda: None)  # type: ignore[arg-type]  # called, and nothing else

    def lend(self, count: int) -> torch.Tensor:
        """The region as an fp32 tensor of `count` elements."""
        held = (ctypes.c_char * self.length).from_buffer(self.memory, self.offset)
        self.lease = weakref.ref(held)
        return torch.frombuffer(held, dtype=torch.float32, count=count)

    def free(self) -> bool:
        """Says that nobody needs what is in it; False if a tensor is still there, or the system does not listen."""
        return self.lease() is None and _advised(self.memory, mmap.MADV_FREE, self.offset, self.length)


def _advised(memory: mmap.mmap, advice: int, offset: int, length: int) -> bool:
    """Returns True if the system knows the advice: kernels are built with large pages or without."""
    try:
        memory.madvise(advice, offset, length)
    except OSError:
        return False
    return True


class Pool:
    """The regions of one optimizer."""

    def __init__(self) -> None:
        self._free: dict[int, list[Region]] = {}
        self._lent: list[Region] = []
        self.wide: Any = WeakTensorKeyDictionary()
        """For gradients the fp32 tensors that stood for them, as long as the step's code keeps these."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for an fp32 tensor that is shaped and laid out like another."""
        length = -(-4 * like.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
        if not IS_KNOWN or length < LEAST or not like.is_cpu:
            return torch.empty_like(like, dtype=torch.float32, requires_grad=False)
        regions = self._free.get(length) or [Region.of(length)]
        self._lent.append(regions.pop())
        strides = torch.empty_like(like, dtype=torch.float32, device="meta").stride()
        made = torch.empty(0, dtype=torch.float32, device="cpu")  # not a view of what is lent
        return made.set_(self._lent[-1].lend(math.prod(like.shape)).untyped_storage(), 0, like.shape, strides)

    def end(self) -> None:
        """The step is over: keeps the regions that it used, other than those that something still refers to."""
        self._free, lent, self._lent = {}, self._lent, []
        for region in lent:
            if region.free():
                self._free.setdefault(region.length, []).append(region)


_pools: weakref.WeakKeyDictionary[Optimizer, Pool] = weakref.WeakKeyDictionary()


def pool(optimizer: Optimizer) -> Pool:
    """The pool of an optimizer."""
    return _pools.setdefault(optimizer, Pool())
