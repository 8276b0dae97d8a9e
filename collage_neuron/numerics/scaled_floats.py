"""Narrow floats beside a power of two that a block shares: `fp16`, `e4m3`, `e5m2`, for averages, and `ue5m3`.

A block is 128 consecutive elements of a row, as in `block_formats`. Its power of two P is that of its largest magnitude
after rounding; the largest elements have the largest exponent of the narrow type, so that all its range lies below::

    code = round(x * top / P),   x = code * (P / top),   top = the power of two of the type's largest number

To nearest even, exactly scaled. The error of an element is half a last place, relative to itself down to the type's
normal numbers (2**-29, 2**-13 and 2**-29 of P) and the same absolute error below; what is less than half the smallest
subnormal number becomes 0 with its sign. So these are no formats for second moments, which need `u16q8` or `ue5m3`.

The largest number of a type is its largest finite one: 240 of e4m3, so that the bytes mean the same in both of its
kinds, OCP's and IEEE's. P is so large that no value of a code is subnormal. Finite numbers stay finite: what would be
rounded to 2**128 becomes the largest number of the block. A block with an element that is not finite holds nothing
that is.

`ue5m3` (stochastic, second moments) is a byte without sign: 5 bits of exponent and 3 of mantissa, subnormals included,
of which the largest is 15/8. P is doubled if the block's maximum lies above 15/8 * P, so that it can be rounded up, but
where it is 2**127: what is larger than 15/8 of that becomes 15/8 of it. Rounded up with the probability of the part
below its last bit, in steps of 2**-16; what is not 0 is at least the smallest number, 2**-33 * P. Encoding what was
decoded gives the same values, and not always the same words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import (
    Value,
    bits_of,
    block_max,
    fp32,
    from_bits,
    inverse_power_of_two,
    magnitudes,
    narrow,
    power_of_block,
    power_of_two,
    round_to,
    shift_right,
    whole,
    widen,
)
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


@dataclass(frozen=True)
class SmallFloat:
    """Floats of 5 bits of exponent and 3 of mantissa, in a byte, beside the power of two of their block."""

    LEAST, NORMAL = 2.0**-93, 2.0**-30
    """The smallest P, and the smallest normal number."""

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest, away from 0 if two are as near."""
        return self._words(x, 1 << 19)

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535."""
        return self._words(x, random << 4)

    def _words(self, x: Value, carry: Value) -> Sequence[Value]:
        """What is added below the last bit of a code carries into it; below `NORMAL` 2**-30 is the implicit bit."""
        size = magnitudes(x)
        largest = block_max(size, BLOCK)
        power = power_of_block(largest * fp32(16 / 15 * (1 - 2**-20)), self.LEAST)
        power = torch.where(power < torch.inf, power, power_of_two(largest))
        # 2 * x / P, where 1 / P may be subnormal. Not from x: the bits of its NaN may differ from backend to backend.
        y = size * inverse_power_of_two(power)
        small = widen(y < 2 * self.NORMAL)
        upper = widen(shift_right(bits_of(y + small * (2 * self.NORMAL)) + carry, 20))
        code = torch.maximum(upper - small * 8.0 - (97 * 8.0), widen(x > 0.0))
        return [narrow(round_to(code, "uint8"), "uint8"), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two: exact."""
        code, power = map(widen, words)
        small = widen(code < 8.0)
        normal = from_bits((whole(code + small * 8.0) << 20) | (96 << 23))
        # NaN where the power is infinite: neighbours of an infinite second moment would stand still silently.
        return (normal - small * self.NORMAL) * (power + (power - power))

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: a last place."""
        most: torch.Tensor = size * 2.0**-3 + 2 * power_of_block(block_max(size, BLOCK), self.LEAST) * 2.0**-33
        return most


UE5M3 = SmallFloat()
