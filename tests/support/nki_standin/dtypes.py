"""Data types: what NumPy stores for them, the way to fp32, and the one rounding on the way back.

Documented: engines compute in fp32 and cast on the write of the destination, to nearest even; a float becomes an
integer by rounding to nearest even and saturates; a DMA between types goes through fp32. bf16 is kept as its 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nki_standin.device import Device
from nki_standin.errors import fail, require

Array = np.ndarray[Any, Any]

F32 = np.dtype(np.float32)
QUIET = np.uint16(0x0040)


@dataclass(frozen=True)
class DType:
    """A type of `nki.language`."""

    name: str
    storage: np.dtype[Any]
    is_float: bool

    @property
    def size(self) -> int:
        """Bytes an element."""
        return self.storage.itemsize

    def __repr__(self) -> str:
        return f"nl.{self.name}"


FLOAT32 = DType("float32", F32, True)
BFLOAT16 = DType("bfloat16", np.dtype(np.uint16), True)
INTEGERS = [DType(n, np.dtype(n), False) for n in ("int8", "int16", "int32", "uint8", "uint16", "uint32")]
DTYPES = {d.name: d for d in (FLOAT32, BFLOAT16, *INTEGERS)}


def dtype(x: object) -> DType:
    """`x` if it is a type of nki.language."""
    if not isinstance(x, DType):
        fail(f"dtype must be one of nki.language, got {x!r}")
    return x


def widen(raw: Array, of: DType) -> Array:
    """Stored elements as fp32: exact for floats, to nearest even for 32-bit integers."""
    if raw.dtype == F32:
        return raw
    if of is BFLOAT16:
        return (raw.astype(np.uint32) << 16).view(F32)
    return raw.astype(F32)


def narrow(x: Array, to: DType, device: Device) -> Array:
    """fp32 numbers as stored elements of `to`, rounded once."""
    if to is FLOAT32:
        return x
    if not to.is_float:
        return _to_integer(x, to)
    return _overflown(_to_bf16(x, device), x, device)


def _to_bf16(x: Array, device: Device) -> Array:
    """To nearest even on the bits: add half an ulp, less one where the last bit that stays is 0, and drop 16 bits."""
    bits = x.view(np.uint32)
    if device.stochastic:
        noise = np.random.default_rng(int(bits.sum(dtype=np.uint64))).integers(0, 1 << 16, x.shape, np.uint32)
    else:
        noise = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    high = (bits >> 16).astype(np.uint16)
    return np.where(np.isfinite(x), ((bits + noise) >> 16).astype(np.uint16), high | np.isnan(x) * QUIET)


def _to_integer(x: Array, to: DType) -> Array:
    limits = np.iinfo(to.storage)
    require(not np.isnan(x).any(), f"a NaN is cast to {to.name}, which is undefined")
    return np.clip(np.rint(x.astype(np.float64)), limits.min, limits.max).astype(to.storage)


def _overflown(raw: Array, x: Array, device: Device) -> Array:
    """`raw` with what is done to finite numbers that became infinite."""
    beyond = np.isinf(widen(raw, BFLOAT16)) & np.isfinite(x)
    if device.overflow == "refuse" and beyond.any():
        fail(f"{x[beyond][0]} is beyond bfloat16: whether the cast gives infinity or the largest is undocumented")
    return raw
