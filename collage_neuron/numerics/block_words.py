"""Words that the elements of a block share: a power of two beside codes, so that the codes need little or no exponent.

A block is K = 128 consecutive elements of a row (the last dimension of the parameter, or of its local shard); the last
block of a row may be shorter. Its power of two P follows from the largest magnitude in it, after rounding, so that it
is chosen from the new values; all products with it are exact, and encoding what was decoded gives the same words.

`i16q4`, `i8q4` (2 and 1 bytes, nearest): fourth-root companding. With y = |x| / P, from 2**0 to 2**1 for the largest::

    code = sign(x) * round(y**(1/4) * codes / 2**(1/4)),   |x| = P * (2**(1/4) / codes * |code|)**4

The relative error of the largest element of a block is below 2**-13.7 (i16q4) and 2**-5.7 (i8q4); that of one which is
a fraction f of it is f**(-1/4) times that. `codes` is a little more than the largest code, so that no code means 2 * P
or more, and such that y = 1 is rounded up, so that the largest element never becomes less than P.

P is 2**-67 at least: no value of a code is subnormal then. A block with an element that is not finite holds nothing
that is finite.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collage_neuron.numerics.eft import (
    Value,
    block_max,
    inverse_power_of_two,
    narrow,
    power_of_two,
    round_to,
    sqrt,
    widen,
)

BLOCK = 128
"""Elements of a block."""


def _power(largest: Value, least: float) -> Value:
    """The power of two of a block: that of its largest magnitude, at least `least`."""
    power = power_of_two(largest)
    return torch.where(power > least, power, least)


def _fp32(x: float) -> float:
    """The fp32 number nearest to x: a literal that every backend reads alike."""
    (nearest,) = struct.unpack("f", struct.pack("f", x))
    return float(nearest)


@dataclass(frozen=True)
class FourthRoot:
    """Codes that are fourth roots, beside the power of two of their block."""

    storage: str
    codes: float
    """The code that 2 * P would have."""

    LEAST = 2.0**-67

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value: its code, and its block's power of two."""
        power = _power(block_max(x, BLOCK), self.LEAST)
        y = x * inverse_power_of_two(power)  # 2 * x / P, from 2 to 4 for the largest, of which 4**(1/4) is 2**(1/2)
        root = sqrt(sqrt(torch.abs(y))) * _fp32(self.codes / 2**0.5)
        code = round_to(torch.sign(y) * root, self.storage)
        return [narrow(code, self.storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        code, power = map(widen, words)
        root = code * _fp32(2**0.5 / self.codes)
        square = root * torch.abs(root)
        return square * torch.abs(square) * (power * 0.5)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: half a code."""
        power = 2 * _power(block_max(size, BLOCK), self.LEAST)
        root, half = (size / power) ** 0.25, 0.5 / self.codes
        found: torch.Tensor = power * half * (4 * root**3 + 6 * half * root**2 + 4 * half**2 * root + half**3)
        return found


I16Q4 = FourthRoot("int16", 32767.25)
I8Q4 = FourthRoot("int8", 127.25 - 2**-4)
