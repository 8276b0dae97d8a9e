"""Memory of the fp32 values, at the same addresses in each step; the system may take it back between steps.

Code may keep what it knows of a parameter by its address, and large tensors that come and go in every step cost more
than the conversion: in pages of 4 KiB, 64 MiB take 17 ms (7 ms of copying), and what is freed makes the C library
return memory that the user's own `step()` has to fetch again. So each value has memory of its own, in large pages where
there are some, which after the step is marked as free (`MADV_FREE`): it counts as the process's until another one needs
memory, and then the system takes it without asking. The next step writes it anew.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import ORDINARY, is_sharded, is_sharded_like
from collage_neuron.states.shared_memory import memory_of

LEAST = 1 << 14
"""Bytes from which a tensor has memory of its own; smaller ones stay allocated."""
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
        # A mapping begins anywhere among small pages: with one large page more, there is an aligned beginning in it.
        memory = mmap.mmap(-1, length + LARGE * aligned, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % LARGE if aligned else 0
        if aligned:
            _advised(memory, mmap.MADV_HUGEPAGE, offset, length)
        return cls(memory, offset, length, lambda: None)  # type: ignore[arg-type]  # called, and nothing else

    @property
    def address(self) -> int:
        """Where it begins."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + self.offset

    def lend(self, count: int) -> torch.Tensor:
        """The region as an fp32 tensor of `count` elements."""
        held = (ctypes.c_char * self.length).from_buffer(self.memory, self.offset)
        self.lease = weakref.ref(held)  # torch keeps it alive for as long as a tensor has the memory
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


def is_alone(t: torch.Tensor) -> bool:
    """Returns True if nothing else refers to the memory of `t`."""
    t = torch_privates.part(t)
    return memory_of(t) != 0 and torch_privates.holders(t) <= 1


def are_alone(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if nothing else refers to the memory of any; False too if one has none, or only one could tell."""
    try:
        found = list(tensors)
        return ORDINARY.issuperset(map(type, found)) and torch_privates.are_held_once(found)
    except (RuntimeError, NotImplementedError):
        return False


def without_graph(t: torch.Tensor) -> torch.Tensor:
    """`t`, or what is in it, without a graph."""
    return t.detach() if t.requires_grad else t


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, by which NaN equals itself."""
    x = x.detach() if x.layout is torch.strided else x.detach().to_dense()  # a method runs beside sparse gradients
    return x.contiguous().reshape(-1).view(torch.uint8)


class Shell(NamedTuple):
    """The memory of a parameter or a state."""

    owner: weakref.ref[torch.Tensor]
    tensor: torch.Tensor
    region: Region | None


class Pool:
    """The memory of one optimizer."""

    def __init__(self) -> None:
        self._free: dict[int, list[Region]] = {}
        self._lent: list[Region] = []
        self._shells: dict[int, Shell] = {}
        self._used: set[int] = set()
        self.wide: dict[int, tuple[weakref.ref[torch.Tensor], Callable[[], torch.Tensor | None]]] = {}
        """By their ids, gradients of before, and what gives the fp32 tensors that stood for them, if they are there."""
        self.buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Buffers of gradients, and the fp32 ones, by their memory: as long as something refers to these."""
        self.laid_out: dict[Any, Any] = {}
        """What backends have found out about the tensors that are converted (`codec`)."""
        self.steady: Any = None
        """A `steady.Steady`, if the last step has left what it found: while all memory stays where it is."""

    def empty(self, like: torch.Tensor) -> torch.Tensor:
        """Memory for an fp32 tensor that is shaped and laid out like another."""
        made, region = self._made(like)
        if region is not None:
            self._lent.append(region)
        return made

    def shell(self, owner: torch.Tensor) -> torch.Tensor:
        """Memory for the fp32 value of a parameter or a state."""
        found = self._shells.get(id(owner))
        if found is None or found.owner() is not owner or not lies_like(found.tensor, owner):
            found = Shell(weakref.ref(owner), *self._made(owner.detach()))
        self._shells[id(owner)] = found
        self._used.add(id(owner))
        return found.tensor

    def are_those_of(self, owners: Sequence[torch.Tensor], shells: Sequence[torch.Tensor]) -> bool:
        """Returns True if `shell` would give these again, which are used then."""
        found: list[Any] = [self._shells.get(id(owner)) for owner in owners]
        if None in found or not all(x.tensor is t for x, t in zip(found, shells, strict=True)):
            return False
        self._used.update(map(id, owners))
        return all(x.owner() is owner for x, owner in zip(found, owners, strict=True))

    def fill(self, owner: torch.Tensor, shell: torch.Tensor) -> torch.Tensor:
        """Memory for a value that had none, or a part; `shell`, which has the first word, gets it after the step."""
        found, like = self._shells.get(id(owner)), without_graph(torch_privates.part(shell))
        if found is None or found.owner() is not owner or is_sharded(owner) or not lies_like(found.tensor, like):
            made, region = self._made(like)
        else:  # that of the last step: an address may have been asked for there too
            made, region = torch.empty(0, dtype=torch.float32, device=like.device), found.region
            torch_privates.exchange(made, found.tensor.requires_grad_(False))
        self._shells[id(owner)] = Shell(weakref.ref(owner), shell, region)
        self._used.add(id(owner))
        return made

    def forget(self, owner: torch.Tensor) -> None:
        """The memory is that of `owner` from now on."""
        self._shells.pop(id(owner), None)

    def _made(self, like: torch.Tensor) -> tuple[torch.Tensor, Region | None]:
        if type(like) in ORDINARY and like.numel() < LEAST // 4 and like.is_contiguous():  # most, in most models
            return torch.empty_like(like, dtype=torch.float32, requires_grad=False), None
        if is_sharded(like):
            made, region = self._made(torch_privates.part(like))
            return torch_privates.sharded_like(made, like), region
        length = -(-4 * like.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
        if has_gaps(like):
            return torch.empty_strided(like.shape, like.stride(), dtype=torch.float32, device=like.device), None
        if not IS_KNOWN or length < LEAST or not like.is_cpu:
            return torch.empty_like(like, dtype=torch.float32, requires_grad=False), None
        region = (self._free.get(length) or [Region.of(length)]).pop()
        made = torch.empty(0, dtype=torch.float32, device="cpu")  # not a view of what is lent
        storage = region.lend(math.prod(like.shape)).untyped_storage()
        return made.set_(storage, 0, like.shape, _strides(like)), region

    def end(self) -> None:
        """The step is over: keeps the memory that it used, and marks as free what nothing refers to."""
        self._free, lent, self._lent = {}, self._lent, []
        for region in lent:
            if region.free():
                self._free.setdefault(region.length, []).append(region)
        for key, shell in list(self._shells.items()):
            # Small ones are there for a step that asks for an address again; other devices have no memory that could be
            # marked as free: it goes with the step.
            own = torch_privates.part(shell.tensor)
            is_kept = key in self._used or (own.is_cpu and own.nbytes < LEAST and torch_privates.holders(own) == 1)
            if not is_kept or shell.owner() is None or not shell.tensor.is_cpu or not self._is_in(shell):
                del self._shells[key]
                self.steady = None
            elif shell.region is not None and torch_privates.holders(torch_privates.part(shell.tensor)) == 1:
                _advised(shell.region.memory, mmap.MADV_FREE, shell.region.offset, shell.region.length)
        self._used.clear()
        for key in [key for key, (_, wide) in self.buffers.items() if is_alone(wide)]:
            del self.buffers[key]

    def _is_in(self, shell: Shell) -> bool:
        """Returns True if a tensor is still where it was made: a step may have given it other data."""
        return shell.region is None or torch_privates.part(shell.tensor).data_ptr() == shell.region.address


def lies_like(t: torch.Tensor, owner: torch.Tensor) -> bool:
    """Returns True for memory that is shaped and laid out as `Pool.empty` makes it."""
    if not is_sharded_like(t, owner):
        return False
    t, owner = torch_privates.part(t), torch_privates.part(owner)
    return t.shape == owner.shape and t.stride() == _strides(owner)


def _strides(like: torch.Tensor) -> tuple[int, ...]:
    if like.is_contiguous() or has_gaps(like):
        return like.stride()
    return torch.empty_like(like, device="meta").stride()


def has_gaps(t: torch.Tensor) -> bool:
    """Returns True for a tensor of which each element has its own place, and which leaves out places in between."""
    if t.is_contiguous() or not t.numel():
        return False
    reach = 1
    for stride, n in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * (n - 1) + reach
    return reach > t.numel()


def pool(optimizer: Optimizer) -> Pool:
    """The pool of an optimizer."""
    ours = bookkeeping(optimizer)
    ours.pool = ours.pool or Pool()
    found: Pool = ours.pool
    return found
