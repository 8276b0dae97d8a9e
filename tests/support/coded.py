"""Formats of blocks for tests: their codes, the values of these from the definitions, and blocks of all of them."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from collage_neuron.numerics.block_formats import ROOTS
from collage_neuron.numerics.formats import FORMATS

WIDE = ("u16q8", "u16q16")
"""Codes of 16 bits without a sign, stored as an int16's."""
NAMES = (*ROOTS,)
UNSIGNED = ("u16q8", "u16q16", "u8q16")
LEAST = {name: fmt.least for name, fmt in ROOTS.items()}
"""The smallest power of two of a block."""


def codes(name: str) -> Tensor:
    """Every code that is ever stored."""
    most, floor = int(ROOTS[name].most), int(ROOTS[name].floor)
    if ROOTS[name].signed:
        return torch.arange(-most, most + 1)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(floor, most + 1)])


def large(name: str) -> tuple[int, int]:
    """The smallest and the largest code of the largest element of a block."""
    return int(ROOTS[name].low), int(ROOTS[name].most)


def as_words(name: str, numbers: Tensor) -> Tensor:
    """Codes as the first words of the format."""
    return numbers.to(FORMATS[name].components[0].type.dtype)


def as_codes(name: str, word: Tensor) -> Tensor:
    """First words as codes: the inverse of `as_words`."""
    return word.long() & 0xFFFF if name in WIDE else word.long()


def blocks(name: str, power: float) -> list[Tensor]:
    """Every code, each in a block whose largest element has one of its codes."""
    every, (low, high) = codes(name), large(name)
    block = torch.zeros(len(every), 3, dtype=torch.int64)
    block[:, 0], block[:, 1] = every, low + torch.arange(len(every)) % (high - low + 1)
    return [as_words(name, block), torch.full(block.shape, power)]


def exact(name: str, code: int | Fraction) -> Fraction:
    """The value of a code, in units of its block's power of two, from the definition; of roots, between codes too."""
    curve = ROOTS[name].curve
    q, origin = 1 << curve.halvings, Fraction(curve.origin)
    root = abs(Fraction(code)) * Fraction(curve.step) + origin
    size: Fraction = (root**q - origin**q) / 2
    return -size if code < 0 else size
