"""Narrow floats beside a power of two that a block shares: `fp16`, `e4m3`, `e5m2`, for averages.

A block is 128 consecutive elements of a row, as in `block_formats`. Its power of two P is that of its largest magnitude
after rounding; the largest elements have the largest exponent of the narrow type, so that all its range lies below::

    code = round(x * top / P),   x = code * (P / top),   top = the power of two of the type's largest number

To nearest even, exactly scaled. The error of an element is half a last place, relative to itself down to the type's
normal numbers (2**-29, 2**-13 and 2**-29 of P) and the same absolute error below; what is less than half the smallest
subnormal number becomes 0 with its sign. So these are no formats for second moments, which need `u16q16` or `u8q16`.

The largest number of a type is its largest finite one: 240 of e4m3, so that the bytes mean the same in both of its
kinds, OCP's and IEEE's. P is so large that no value of a code is subnormal. Finite numbers stay finite: what would be
rounded to 2**128 becomes the largest number of the block. A block with an element that is not finite holds nothing
that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import Value, block_max, inverse_power_of_two, narrow, power_of_two, round_to, widen
from collage_neuron.numerics.storage import storage_named


@dataclass(frozen=True)
class ScaledFloat:
    """Words of a narrow floating-point type, beside the power of two of their block."""

    storage: str
    top: float
    """The power of two of its largest number."""
    smallest: float
    """Its smallest subnormal number."""

    @property
    def half(self) -> float:
        """Half a last place of numbers from 1 to 2."""
        return 2.0 ** -storage_named(self.storage).digits

    @property
    def least(self) -> float:
        """The smallest P: the smallest number of a block is normal in fp32."""
        return 2.0**-126 * self.top / self.smallest

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value: its code, and its block's power of two."""
        largest = block_max(x, BLOCK)
        power = power_of_two(largest)
        rounded = power_of_two(largest + power * self.half)  # exact below 2 * power: the next one, if it is rounded up
        power = torch.where(rounded < torch.inf, rounded, power)
        power = torch.where(power > self.least, power, self.least)
        code = round_to(x * (inverse_power_of_two(power) * (self.top / 2)), self.storage)
        return [narrow(code, self.storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two: exact."""
        code, power = map(widen, words)
        return code * (power * (1 / self.top))

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: half a last place."""
        power = 2 * power_of_two(block_max(size, BLOCK)).double().clamp(min=self.least)
        most: torch.Tensor = size.double() * self.half + power * (self.smallest / self.top / 2)
        return most.float()


def _scaled(name: str) -> ScaledFloat:
    """The format of a storage type, by its limits."""
    info = torch.finfo(storage_named(name).dtype)
    largest = storage_named(name).largest or info.max
    return ScaledFloat(name, top=2.0 ** math.floor(math.log2(largest)), smallest=info.tiny * info.eps)


FP16 = _scaled("fp16")
E4M3 = _scaled("e4m3")
E5M2 = _scaled("e5m2")
