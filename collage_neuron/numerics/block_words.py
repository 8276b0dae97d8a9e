"""Words that the elements of a block share: a power of two beside codes, so that the codes need little or no exponent.

A block is K = 128 consecutive elements of a row (the last dimension of the parameter, or of its local shard); the last
block of a row may be shorter. Its power of two P follows from the largest magnitude in it, after rounding, so that it
is chosen from the new values; all products with it are exact, and encoding what was decoded gives the same values (the
same words too, but for `ue5m3`).

`i16q4` (2 bytes, nearest), `i8q4` (1 byte, stochastic): fourth roots. With y = |x| / P, from 2**0 to 2**1 for the
largest::

    code = sign(x) * round(y**(1/4) * codes / 2**(1/4)),   |x| = P * (2**(1/4) / codes * |code|)**4

The relative error of the largest element of a block is below 2**-13.7 (i16q4) and 2**-5.7 (i8q4); that of one which is
a fraction f of it is f**(-1/4) times that. `codes` is a little more than the largest code, so that no code means 2 * P
or more, and such that y = 1 is rounded up, so that the largest element never becomes less than P.

`i8q4` is drawn between two codes with the probability that makes the value right on average. To nearest, an average
that decays by b a step would stall at the codes c below 1 / 2 / (1 - b**(1/4)), since c * b**(1/4) rounds to c again:
at 19 of 127 for b = .9 (5e-4 of the maximum), and at every code for b = .99. Where gradients are 0 the second moment
decays on, so the quotient of the two would grow without an end. Drawn, an average decays by b in expectation, to 0; the
largest element of a block too, which is drawn across powers of two (`power_gaps`).

`i16q4` stalls at the same codes, which are values 2**32 times as small: for b = .9 at 19 / 32767, 1.1e-13 * 2 * P.
Beside `u16q8`, whose root is at least 2**-24 of that of 2 * P, the quotient ends below 2e-6 of that of the largest
elements (b = .95: 4e-5; .98: 2e-3; .99: 3e-2). At b = .999 it would be 230: choose wider averages there. Beside a
second moment without a floor (`split423`, `split323`), `eps` bounds the quotient.

What one large value hides in its block, against 2 * P: `i8q4` draws what is smaller than 1 / 127**4 = 4e-9 between 0
and that, `i16q4` rounds what is smaller than 5e-20 to 0; `u16q8` holds what is smaller than 2**-48 = 4e-15 as that, and
`ue5m3` what is smaller than 2**-34 = 6e-11 (of 2 * P; its smallest number is 2**-33 * P). A second moment that is held
too large makes steps smaller, never larger.

`u16q8` (2 bytes, stochastic): the same with eighth roots, for second moments, which are not negative; the code is 0 to
65535, in an int16 as its bits. A code is rounded up with the probability of its fraction, in steps of 2**-16, so that
small increments do not stall. Nothing that is not 0 becomes 0: codes below 1024 (2**-48 * P) are 1024.
From 2 * P on and below P a code is what is next to it, which is nearer than 2**-18.

`ue5m3` (1 byte, stochastic): floats without sign, 5 bits of exponent and 3 of mantissa, subnormals included, of which
the largest is 15/8. P is doubled if the block's maximum lies above 15/8 * P, so that it can be rounded up, but where it
is 2**127: what is larger than 15/8 of that becomes 15/8 of it. Rounded up with the probability of the part below its
last bit, in steps of 2**-16; what is not 0 is at least the smallest number.

P is so large that no value of a code is subnormal. A block with an element that is not finite, or negative where codes
have no sign, holds nothing that is finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from collage_neuron.numerics.blocks import BLOCK as BLOCK
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
    sqrt,
    whole,
    widen,
)
from collage_neuron.numerics.power_gaps import Gap

INFINITY = float("inf")


def if_finite(power: Value) -> Value:
    """A power of two, or NaN where it is infinite: neighbours of an infinite second moment would stand still silently.

    Of finite numbers the difference is 0.
    """
    return power + (power - power)


@dataclass(frozen=True)
class FourthRoot:
    """Codes that are fourth roots, beside the power of two of their block."""

    storage: str
    codes: float
    """The code that 2 * P would have."""
    most: float
    """The largest code."""
    low: float
    """The smallest code of what is P or more."""
    off: float
    """The largest error of storing a value, in codes: a half to nearest, one if stochastic."""

    LEAST = 2.0**-67

    @cached_property
    def gap(self) -> Gap:
        ends = torch.tensor([self.most, self.low], dtype=torch.float32, device="cpu")
        below, above = self._fourth_power(ends).tolist()
        return Gap(below / 2, above, self.LEAST)

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest: its code, and its block's power of two."""
        power = power_of_block(block_max(x, BLOCK), self.LEAST)
        y = x * inverse_power_of_two(power)  # 2 * x / P, from 2 to 4 for the largest, of which 4**(1/4) is 2**(1/2)
        root = sqrt(sqrt(torch.abs(y))) * fp32(self.codes / 2**0.5)
        code = round_to(torch.sign(y) * root, self.storage)
        return [narrow(code, self.storage), narrow(power, "fp32")]

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535.

        Chances are exactly 0 and 1 for the value of a code, whichever of two codes `below` then is, since values are
        computed as `decode` computes them: what was decoded, and zero, is drawn as the same words.
        """
        size = torch.abs(x)
        top, u = self.gap.draw(
            size, *((widen(n) + 0.5) * 2.0**-16 for n in (random, random if other is None else other))
        )
        power = power_of_block(block_max(top, BLOCK), self.LEAST)
        y = size * inverse_power_of_two(power)  # 2 * |x| / P, from 2 to 4 for the largest
        below = round_to(sqrt(sqrt(y)) * fp32(self.codes / 2**0.5) - 0.5, self.storage)
        low, high = self._fourth_power(below), self._fourth_power(below + 1.0)
        code = below + widen(u * (high - low) < y - low)
        code = torch.where(code > self.most, self.most, code)
        code = torch.maximum(code, widen(top * inverse_power_of_two(power) >= self.gap.above) * self.low)
        return [narrow(round_to(torch.sign(x) * code, self.storage), self.storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        code, power = map(widen, words)
        return self._fourth_power(code) * (power * 0.5)

    def _fourth_power(self, code: Value) -> Value:
        """The value of a code, in halves of its block's power of two."""
        root = code * fp32(2**0.5 / self.codes)
        square = root * torch.abs(root)
        return square * torch.abs(square)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`."""
        power = 2 * self.gap.largest(size)
        root, off = (size / power) ** 0.25, self.off / self.codes
        found: torch.Tensor = power * off * (4 * root**3 + 6 * off * root**2 + 4 * off**2 * root + off**3)
        return found


@dataclass(frozen=True)
class EighthRoot:
    """Codes that are eighth roots of numbers that are not negative, beside the power of two of their block."""

    most: float
    """The largest code."""
    low: float
    """The smallest code of what is P or more."""

    LEAST, FLOOR = 2.0**-77, 1024.0

    @property
    def codes(self) -> float:
        """The code that 2 * P would have."""
        return self.most + 2.0**-5

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest."""
        return self._words(x, lambda code: round_to(code, "uint16"))

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535."""

        def rounded(code: Value) -> Value:
            below = round_to(code - 0.5, "uint16")  # of a whole number maybe the one before it, and then always up
            return below + widen(widen(random) * 2.0**-16 < code - below)

        return self._words(x, rounded)

    def _words(self, x: Value, rounded: Callable[[Value], Value]) -> Sequence[Value]:
        power = power_of_block(block_max(magnitudes(x), BLOCK), self.LEAST)
        y = x * inverse_power_of_two(power)  # 2 * x / P, from 2 to 4 for the largest
        code = rounded(sqrt(sqrt(sqrt(y))) * fp32(self.codes / 4**0.125))
        code = torch.where(code > self.most, self.most, code)
        code = torch.maximum(code, widen(x > 0.0) * self.FLOOR + widen(y >= 2.0) * (self.low - self.FLOOR))
        signed = code - widen(code > 32767.0) * 65536.0
        return [narrow(round_to(signed, "int16"), "int16"), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        signed, power = map(widen, words)
        root = (signed + widen(signed < 0.0) * 65536.0) * fp32(4**0.125 / self.codes)
        square = root * root
        fourth = square * square
        return fourth * fourth * (if_finite(power) * 0.5)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: a code, and what becomes the smallest one."""
        power = 2 * power_of_block(block_max(size, BLOCK), self.LEAST).double()
        root = (size.double() / power) ** 0.125
        found: torch.Tensor = power * ((root + 1.1 / self.codes) ** 8 - root**8 + (self.FLOOR / self.codes) ** 8)
        return found.float()


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
        power = torch.where(power < INFINITY, power, power_of_two(largest))
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
        return (normal - small * self.NORMAL) * if_finite(power)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: a last place."""
        found: torch.Tensor = size * 2.0**-3 + 2 * power_of_block(block_max(size, BLOCK), self.LEAST) * 2.0**-33
        return found


I16Q4 = FourthRoot("int16", 32767.25, most=32767.0, low=27554.0, off=0.5)
I8Q4 = FourthRoot("int8", 127.25 - 2**-4, most=127.0, low=107.0, off=1.0)
U16Q8 = EighthRoot(most=65317.0, low=59896.0)
UE5M3 = SmallFloat()
