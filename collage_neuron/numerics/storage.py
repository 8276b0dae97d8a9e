"""Storage types: the kinds of words in memory, with their widths, roundings, and names in each backend.

A storage type is data, and `STORAGE_TYPES` is the only table of them. Formats and graphs refer to its entries by name,
and every backend reads from it the width of a word and its name in HLO, NKI and LLVM. A new kind of word is a new
entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StorageType:
    """One kind of word."""

    name: str
    """Its name in graphs: `round_to(x, name)`, `narrow(x, name)`."""
    dtype: torch.dtype
    hlo: str
    """Its element type in HLO."""
    nki: str
    """Its name in `nki.language`."""
    precision: tuple[int, int] | None
    """(exponent bits, explicit mantissa bits) of a floating-point word, as XLA's reduce-precision counts them."""
    largest: float | None = None
    """The number that larger ones are rounded to, of a floating-point word; None if they may become infinite."""

    @property
    def bytes(self) -> int:
        """Bytes per word."""
        return self.dtype.itemsize

    @property
    def bits(self) -> int:
        """Bits per word."""
        return 8 * self.bytes

    @property
    def is_floating(self) -> bool:
        """Returns True for floating-point words, False for integers."""
        return self.precision is not None

    @property
    def digits(self) -> int:
        """Significant bits that a floating-point type needs to hold this type in one binade: 8 for bf16 and int8."""
        return self.bits if self.precision is None else self.precision[1] + 1

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest number of an integer word."""
        info = torch.iinfo(self.dtype)
        return info.min, info.max

    def round(self, x: Tensor) -> Tensor:
        """The fp32 tensor `x` rounded to this type, to nearest even, as fp32.

        An integer word saturates, and a narrow floating-point one does. What they hold of a NaN is not defined.
        """
        if self.largest is not None:
            limited = x.clamp(-self.largest, self.largest)
            # On XLA a clamp makes the smallest number of a NaN.
            x = torch.where(x == x, limited, x) if _on_xla(x) else limited
        if self.is_floating:
            return x.to(self.dtype).to(torch.float32)
        return x.round().clamp(*self.limits)


def _on_xla(x: object) -> bool:
    """Returns True for a tensor on XLA; what writes a graph passes through here too, and is none."""
    return isinstance(x, Tensor) and x.device.type == "xla"


STORAGE_TYPES: dict[str, StorageType] = {
    t.name: t
    for t in (
        StorageType("bf16", torch.bfloat16, hlo="bf16", nki="bfloat16", precision=(8, 7)),
        StorageType("fp32", torch.float32, hlo="f32", nki="float32", precision=(8, 23)),
        StorageType("int8", torch.int8, hlo="s8", nki="int8", precision=None),
        StorageType("int16", torch.int16, hlo="s16", nki="int16", precision=None),
        StorageType("uint8", torch.uint8, hlo="u8", nki="uint8", precision=None),
        # Only rounded to: torch has few operations on its words, which are stored as those of an int16.
        StorageType("uint16", torch.uint16, hlo="u16", nki="uint16", precision=None),
        StorageType("fp16", torch.float16, hlo="f16", nki="float16", precision=(5, 10), largest=65504.0),
        # OCP's e4m3 has numbers up to 448, IEEE's has infinities from 256 on: up to 240 their bytes are the same.
        StorageType("e4m3", torch.float8_e4m3fn, hlo="f8e4m3fn", nki="float8_e4m3", precision=(4, 3), largest=240.0),
        StorageType("e5m2", torch.float8_e5m2, hlo="f8e5m2", nki="float8_e5m2", precision=(5, 2), largest=57344.0),
    )
}
"""Every known storage type by name. Integers are whole numbers of fp32, which holds all of them up to 24 bits."""


def storage_named(name: object) -> StorageType:
    """The storage type called `name`; ValueError with the known names otherwise."""
    if not isinstance(name, str) or name not in STORAGE_TYPES:
        raise ValueError(f"unknown storage type {name!r}; known types: {', '.join(STORAGE_TYPES)}")
    return STORAGE_TYPES[name]


def storage_of(dtype: torch.dtype) -> StorageType:
    """The storage type whose words are of `dtype`; ValueError if there is none."""
    for storage in STORAGE_TYPES.values():
        if storage.dtype == dtype:
            return storage
    raise ValueError(f"no storage type has words of {dtype}; known types: {', '.join(STORAGE_TYPES)}")
