"""Tensors: storage in one memory, and views of it as [stride, count] access patterns.

On-chip tensors (SBUF, PSUM) have the partition as first dimension, two dimensions or more, at most 128 partitions.
A view never copies. Source: the NKI language guide ("Tensor Values", "Tensor Indexing").
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any

import numpy as np
from typing_extensions import Self

from nki_standin.device import FREE_PSUM, PARTITIONS
from nki_standin.dtypes import FLOAT32, Array, DType
from nki_standin.errors import fail, require, sites
from nki_standin.loops import Register


class MemoryRegion(Enum):
    """Where a tensor lives."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


class Storage:
    """The elements of one allocation, flat, and which of their bytes were written."""

    def __init__(self, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion, name: str, precise: bool) -> None:
        wide = not precise and dtype.is_float and buffer in ON_CHIP
        self.data: Array = np.zeros(prod(shape), FLOAT32.storage if wide else dtype.storage)
        self.written: Array = np.zeros((prod(shape), self.data.itemsize), bool)
        self.dtype, self.buffer, self.name, self.sites = dtype, buffer, name, sites()
        self.shape, self.free = shape, prod(shape[1:])
        self.mutable = True
        self.made_in: int | None = None
        """The iteration of a compiled loop in which it was allocated."""
        self.stored = False
        """Whether an instruction wrote to it."""
        self.used: dict[tuple[int, str], Array] = {}
        """Which of its bytes each of several cores has read or written."""

    @property
    def partition_bytes(self) -> int:
        """Bytes a partition."""
        return self.free * self.dtype.size


class NkiTensor:
    """A view of a storage: element (i, j, ...) lies at offset + i * strides[0] + j * strides[1] + ..."""

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...] | None = None,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = shape or storage.shape, strides or _dense(storage.shape)
        self.dtype, self.buffer, self.name = storage.dtype, storage.buffer, storage.name

    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: prod(self.shape))
    on_chip = property(lambda self: self.buffer in ON_CHIP)
    raw = property(lambda self: self._strided(self._flat))
    written = property(lambda self: self.over(self.storage.written))
    _flat = property(lambda self: self.storage.data if self.dtype is self.storage.dtype else self._reinterpreted())
    _free = property(lambda self: self.storage.free * self.storage.dtype.size // self.dtype.size)

    @property
    def elements(self) -> tuple[int, int]:
        """(partitions, elements a partition)."""
        return self.shape[0], prod(self.shape[1:])

    @property
    def partition(self) -> int:
        """The partition an on-chip view starts at."""
        return self.offset // int(self._free)

    def is_contiguous(self) -> bool:
        """Whether the free dimensions (all, in HBM) are dense and in row-major order."""
        kept = [(n, s) for n, s in zip(self.shape, self.strides, strict=True)][int(self.on_chip) :]
        return all(n == 1 or s == prod(m for m, _ in kept[i + 1 :]) for i, (n, s) in enumerate(kept))

    def get_pattern(self) -> list[list[int]]:
        """[[stride, count], ...] as `ap` takes it."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def __getitem__(self, key: Any) -> Self:
        keys = key if isinstance(key, tuple) else (key,)
        keys = (slice(None),) * self.ndim if keys == (...,) else keys + (slice(None),) * (self.ndim - len(keys))
        require(len(keys) == self.ndim, f"{len(keys)} indices for {self.ndim} dimensions")
        offset, dims = self.offset, []
        for i, (k, n, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            start, count, step = _bounds(k, n, i)
            offset += start * stride
            dims.append((count, stride * step))
        return self._same(tuple(n for n, _ in dims), tuple(s for _, s in dims), offset)

    def __setitem__(self, key: Any, value: Any) -> None:
        fail("a tensor is written by instructions of nki.isa only, not by assignment")

    def reshape(self, shape: Sequence[int]) -> Self:
        """The same elements under another shape; the partition dimension stays."""
        shape = tuple(shape)
        require(prod(shape) == self.size, f"reshape of {self.shape} to {shape} changes the number of elements")
        require(self.is_contiguous(), f"reshape of a view that is not contiguous: {self.get_pattern()}")
        if not self.on_chip:
            return self._same(shape, _dense(shape), self.offset)
        require(shape[0] == self.shape[0] and len(shape) >= 2, f"reshape of an on-chip {self.shape} to {shape}")
        return self._same(shape, (self.strides[0], *_dense(shape[1:])), self.offset)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: Any = None,
        indirect_dim: int = 0,
        dtype: DType | None = None,
    ) -> Self:
        """An access pattern [[stride, count], ...] on the whole storage, in elements; `offset` adds to the view's."""
        require(vector_offset is None and dtype is None, "ap with a vector_offset or a dtype is not in the stand-in")
        require(self.dtype is self.storage.dtype, "ap of a reinterpreted view is not in the stand-in")
        require(1 <= len(pattern) <= 5, f"an access pattern has up to 5 dimensions, got {len(pattern)}")
        strides, shape = tuple(int(s) for s, _ in pattern), tuple(int(n) for _, n in pattern)
        require(all(n > 0 for n in shape) and all(s >= 0 for s in strides), f"access pattern {pattern}")
        view = type(self)(self.storage, shape, strides, self.offset + (offset or 0))
        if scalar_offset is not None:
            view.offset += self._indirect(scalar_offset, indirect_dim)
        return view._checked()

    def _indirect(self, register: Any, dim: int) -> int:
        """The elements that a register skips: its value times the elements right of a dimension of this view."""
        require(isinstance(register, Register), f"scalar_offset is a register, got {register!r}")
        require(0 <= dim < self.ndim and self.is_contiguous(), f"indirect_dim {dim} of {self.get_pattern()}")
        return int(register.value * prod(self.shape[dim + 1 :]))

    def view(self, dtype: DType) -> Self:
        """The same bits as another type; if of another size, the last dimension has more elements, or fewer."""
        precise = self.storage.data.itemsize == self.storage.dtype.size
        require(precise, "view of bits with NKI_PRECISE_FP=0: the bits are not there")
        result = type(self)(self.storage, *self._in_units_of(dtype))
        result.dtype = dtype
        return result

    def _in_units_of(self, dtype: DType) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape, strides and offset in elements of another type."""
        old, new = self.dtype.size, dtype.size
        if old == new:
            return self.shape, self.strides, self.offset
        *outer, stride = self.strides
        text = f"view of {self.dtype} as {dtype}: the last dimension of {self.get_pattern()}"
        require(stride == 1, f"{text} is not dense")
        require(all(n * old % new == 0 for n in (self.offset, self.shape[-1], *outer)), f"{text} is not even")
        offset, count, *strides = (n * old // new for n in (self.offset, self.shape[-1], *outer))
        return (*self.shape[:-1], count), (*strides, 1), offset

    def over(self, mask: Array) -> Array:
        """The part of a mask, of the bytes of its storage, that says something of its elements."""
        return self._strided(mask.reshape(-1, self._flat.itemsize))

    def bits(self) -> Array:
        """The stored elements as they are, writable, of the dtype's storage type."""
        raw: Array = self.raw
        return raw

    def _reinterpreted(self) -> Array:
        return self.storage.data.view(self.dtype.storage)

    def _strided(self, flat: Array) -> Array:
        size = flat.strides[0]
        shape, strides = (*self.shape, *flat.shape[1:]), (*(s * size for s in self.strides), *flat.strides[1:])
        return np.ndarray(shape, flat.dtype, flat, self.offset * size, strides)  # as_strided takes ten times as long

    def _checked(self) -> Self:
        """Itself, if every element it addresses exists (on chip: within the partition it starts in)."""
        free = int(self._free)
        dims = list(zip(self.strides, self.shape, strict=True))
        last = self.offset + _reach(dims)
        if self.on_chip and len(dims) < 2:
            fail(f"{self._accessed()}: an on-chip view has two dimensions or more")
        if self.on_chip and self.strides[0] != free:
            fail(f"{self._accessed()}: the partition stride must be {free}, the storage's free size")
        if self.on_chip and self.offset % free + _reach(dims[1:]) >= free:
            fail(f"{self._accessed()} leaves its partition of {free} elements")
        if last >= self._flat.size:
            fail(f"{self._accessed()} is out of bounds: element {last} of {self._flat.size}")
        return self

    def _accessed(self) -> str:
        return f"access pattern {self.get_pattern()} at offset {self.offset}"

    def _same(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Self:
        """A view of the same storage as the same type."""
        result = type(self)(self.storage, shape, strides, offset)
        result.dtype = self.dtype
        return result

    def _operator(self, *_: Any) -> None:
        fail("python operators on tensors are not instructions of nki.isa")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __invert__ = _operator
    __iadd__ = __isub__ = __imul__ = _operator

    def _value(self) -> Any:
        fail("the value of a tensor is not known while the kernel is built: no if, while, int() or float() on it")

    __bool__ = __int__ = __float__ = __index__ = _value

    def __repr__(self) -> str:
        return f"{self.buffer.value} {self.dtype.name}{list(self.shape)}"


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def _reach(dims: Sequence[tuple[int, int]]) -> int:
    return sum(s * (n - 1) for s, n in dims)


def _bounds(key: Any, n: int, dim: int) -> tuple[int, int, int]:
    """(start, count, step) of a slice of `n` elements; out of bounds is an error, not clipped as in NumPy."""
    require(isinstance(key, slice), f"index {key!r} on dimension {dim} is not a slice")
    start, stop, step = (x if y is None else y for x, y in zip((0, n, 1), (key.start, key.stop, key.step), strict=True))
    whole = all(isinstance(x, int) for x in (start, stop, step))
    require(whole and int(step) > 0, f"index {key} on dimension {dim}: start, stop and step are ints, step positive")
    start, stop, step = int(start), int(stop), int(step)
    require(0 <= start < stop <= n, f"out of bounds on dimension {dim}: [{start}:{stop}] of {n}")
    return start, -(-(stop - start) // step), step


def allocate(
    shape: Sequence[Any], dtype: DType, buffer: MemoryRegion, name: str, precise: bool, limits: dict[MemoryRegion, int]
) -> Storage:
    """Fresh elements; `limits` are bytes a partition of the on-chip memories."""
    shape = tuple(shape)
    require(len(shape) > 0 and all(isinstance(n, int) and n > 0 for n in shape), f"shape {shape}: positive ints")
    require(isinstance(buffer, MemoryRegion), f"buffer must be nl.sbuf, nl.psum or an HBM of nl, got {buffer!r}")
    storage = Storage(shape, dtype, buffer, name, precise)
    if buffer in ON_CHIP:
        require(len(shape) >= 2, f"SBUF and PSUM tensors have at least 2 dimensions, got {shape}")
        require(shape[0] <= PARTITIONS, f"partition dimension {shape[0]} exceeds maximum {PARTITIONS}")
        bank = buffer is not MemoryRegion.psum or storage.free <= FREE_PSUM
        require(bank, f"a tile in PSUM has up to {FREE_PSUM} elements a partition, got {storage.free}")
        size, most = storage.partition_bytes, limits[buffer]
        require(size <= most, f"a tile of {size} bytes a partition exceeds the {most} of {buffer.value}")
    return storage
