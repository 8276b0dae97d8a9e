"""Formats of blocks for tests: their codes, the values of these from the definitions, and blocks of all of them."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from collage_neuron.numerics.block_formats import FLOATS, ROOTS
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.storage import storage_named

WIDE = ("u16q8", "u16q16")
"""Codes of 16 bits without a sign, stored as an int16's."""
NAMES = (*ROOTS, *FLOATS)
UNSIGNED = ("u16q8", "u16q16", "u8q16")
LEAST = {name: fmt.least for name, fmt in ROOTS.items()} | {name: fmt.least for name, fmt in FLOATS.items()}
"""The smallest power of two of a block."""


def codes(name: str) -> Tensor:
    """Every code that is ever stored; of a floating-point word its bits, as a signed number."""
    if name in FLOATS:
        bits = torch.arange(_last(name) + 1)
        return torch.cat([bits, bits - (1 << (storage_named(name).bits - 1))])
    most, floor = int(ROOTS[name].most), int(ROOTS[name].floor)
    if ROOTS[name].signed:
        return torch.arange(-most, most + 1)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(floor, most + 1)])


def large(name: str) -> tuple[int, int]:
    """The smallest and the largest code of the largest element of a block."""
    if name in FLOATS:
        digits = storage_named(name).digits - 1
        return _last(name) >> digits << digits, _last(name)
    return int(ROOTS[name].low), int(ROOTS[name].most)


def _last(name: str) -> int:
    """The bits of the largest number of a floating-point type."""
    storage = storage_named(name)
    kind = torch.int16 if storage.bits == 16 else torch.int8
    return int(torch.tensor(storage.largest).to(storage.dtype).view(kind))


def as_words(name: str, numbers: Tensor) -> Tensor:
    """Codes as the first words of the format."""
    dtype = FORMATS[name].components[0].type.dtype
    if name not in FLOATS:
        return numbers.to(dtype)
    return numbers.to(torch.int16 if dtype.itemsize == 2 else torch.int8).view(dtype)


def as_codes(name: str, word: Tensor) -> Tensor:
    """First words as codes: the inverse of `as_words`."""
    if name in FLOATS:
        word = word.view(torch.int16 if word.dtype.itemsize == 2 else torch.int8)
    return word.long() & 0xFFFF if name in WIDE else word.long()


def blocks(name: str, power: float) -> list[Tensor]:
    """Every code, each in a block whose largest element has one of its codes."""
    every, (low, high) = codes(name), large(name)
    block = torch.zeros(len(every), 3, dtype=torch.int64)
    block[:, 0], block[:, 1] = every, low + torch.arange(len(every)) % (high - low + 1)
    return [as_words(name, block), torch.full(block.shape, power)]


def exact(name: str, code: int | Fraction) -> Fraction:
    """The value of a code, in units of its block's power of two, from the definition; of roots, between codes too."""
    if name in ROOTS:
        curve = ROOTS[name].curve
        q, origin = 1 << curve.halvings, Fraction(curve.origin)
        root = abs(Fraction(code)) * Fraction(curve.step) + origin
        size: Fraction = (root**q - origin**q) / 2
        return -size if code < 0 else size
    code = int(code)
    storage = storage_named(name)
    assert storage.precision is not None
    sign = code < 0
    bits = code + (1 << (storage.bits - 1)) if sign else code
    field = _float(bits, storage.precision[1]) * Fraction(2) ** (1 - (1 << (storage.precision[0] - 1)))
    return field / Fraction(FLOATS[name].top) * (-1 if sign else 1)


def _float(bits: int, digits: int) -> Fraction:
    """A number without sign, by its fields: 2**field * (1 + fraction), and subnormal numbers below 2."""
    field, mantissa = divmod(bits, 1 << digits)
    return Fraction(((field > 0) * 2**digits + mantissa) << max(field, 1), 2**digits)
