"""Formats of blocks: codes that are roots (`i16q8`, `i8q8`, `u16q16`, `u8q16`, `i16q4`, `i8q4`, `u16q8`).

A block is K = 128 consecutive elements of a row (the last dimension of the parameter, or of its local shard); blocks
never cross a row, and its last one may be shorter. Its power of two P follows from the largest magnitude in it, so that
it is chosen from the new values; all products with it are exact, and encoding what was decoded gives the same words.
With y = 2 * |x| / P, from 2**1 to 2**2 for the largest::

    code = round(((y + o**q)**(1/q) - o) / step),   |x| = P / 2 * ((step * code + o)**q - o**q)

Roots alone have many codes for numbers near 0, which nobody needs: o**q is where the codes become equally spaced. It
and `step` are short fractions of powers of two, so that step * code + o is exact, and 0 is.

| | q | codes | spacing | equally spaced below | smallest |
|---|---|---|---|---|---|
| `i16q8`, averages, nearest | 8 | -32598 to 32598 | 2**-12.1 f**-1/8 | 2**-48 | 2**-55 |
| `i8q8`, averages, stochastic | 8 | -126 to 126 | 2**-4.1 f**-1/8 | 2**-24 | 2**-26 |
| `u16q16`, second moments, stochastic | 16 | 896 to 65316, and 0 | 2**-12.1 f**-1/16 | 2**-48 | 2**-48 |
| `u8q16`, second moments, stochastic | 16 | 0 to 255 | 2**-4.1 f**-1/16 | 2**-48 | 2**-51 |
| `i16q4`, averages, nearest | 4 | -32767 to 32767 | 2**-12.7 f**-1/4 | none | 5e-20 |
| `i8q4`, averages, stochastic | 4 | -127 to 127 | 2**-4.7 f**-1/4 | none | 4e-9 |
| `u16q8`, second moments, stochastic | 8 | 1024 to 65317, and 0 | 2**-12.9 f**-1/8 | none | 2**-48 |

(spacing relative to an element that is a fraction f of 2 * P; the others against 2 * P.) Elements with a scale for
each row and each column of a matrix span 2**20 within a block, their squares 2**40. There the last three, which the
strategies of earlier versions had, are two to three times less accurate; elsewhere they are a little more accurate.

The largest element of a block is never stored as less than P, nor as 2 * P or more, so that P stays: to nearest, by the
choice of `step`; otherwise by limits on the code. Drawn, it crosses from one power of two to another with its chance
(`Gap`). All are drawn between the values of two codes, so that an average moves at its rate in expectation, whatever
its codes are. Drawn between the codes themselves, which are roots, every store would be too large in expectation: where
the chance of going up is f, by f * (1 - f) / 2 * h**2 for codes that are h apart, since roots curve. Averages of
`u8q16` with b = .999 were 2 to 4 % too large that way.

Averages of 8 bits are drawn, since to nearest one that decays by b a step would stall at the codes c below
1 / 2 / (1 - b**(1/q)): for q = 4 at 19 of 127 for b = .9, and at every code for b = .99. Where gradients are 0 the
second moment decays on, so the quotient of the two would grow without an end. With 16 bits the same codes are values
that are 2**32 times as small. `i16q8` stands still for b = .9 at 2**-53 of 2 * P, for .99 at 2**-48, for .999 at
2**-24; the root of the smallest second moment is 2**-24 of that of 2 * P, so the quotient ends below that of the
largest elements for every b up to .999. `i16q4` can run away at .999.

Codes without a sign store nothing that is not 0 as 0. What lies between 0 and the smallest code becomes that code, too
large: an average that decays ends there, and small values in the block of a very large one are held there. A second
moment that is held too large makes steps smaller, never larger. P is so large that no value of a code is subnormal. A
block with an element that is not finite, or negative where codes have no sign, holds nothing that is finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from collage_neuron.numerics.eft import (
    Value,
    block_max,
    fp32,
    inverse_power_of_two,
    magnitudes,
    narrow,
    power_of_block,
    round_to,
    sqrt,
    widen,
)

BLOCK = 128
"""Elements of a block."""


def spread(words: torch.Tensor, block: int, length: int) -> torch.Tensor:
    """The word of the block of each element, in rows of `length` elements."""
    return words.repeat_interleave(block, dim=-1)[..., :length]


def first_of_each(words: torch.Tensor, block: int) -> torch.Tensor:
    """One word for each block, of a tensor in which the elements of a block have the same."""
    return words[..., ::block]


class Drawn(NamedTuple):
    """What the power of two of a block follows from, and the number by which each element is drawn."""

    top: Value
    u: Value


@dataclass(frozen=True)
class Gap:
    """Around a power of two P, what no code means: from the value of the last code below it to the first one above.

    No code of a block means 2 * P or more, and its largest element is never stored as less than P, so that P is found
    again from what was stored. In words of 8 bits the gap is a few per cent wide, and an average with b = .999 moves by
    less in a step: always stored as the nearer end, the largest elements of blocks would stand still for ever.
    """

    below: float
    """What the largest code of the power before it means, in halves of P; like the next."""
    above: float
    """What the smallest code of the largest element of a block means."""
    least: float
    """The smallest power of two of a block."""

    def draw(self, size: Value, u: Value, other: Value) -> Drawn:
        """The size, or if it is in a gap one of its ends, drawn by `other`: a block's power is that of the largest.

        The size itself is then to be drawn by the number returned: u, or in a gap `other`, both uniform from 0 to 1.
        """
        # If other elements keep the power, it is drawn between the codes beside it. The gap is part of their interval:
        # what goes up here goes up there, and is stored as the end above; if none keeps it, what is drawn down here is
        # the largest code of the power before. So the expectation is the size in both cases.
        power = self.power(size)
        y = size * inverse_power_of_two(power)
        up = other * fp32(self.above - self.below) < y - self.below
        ends = torch.maximum(size, power * (self.above / 2)), torch.minimum(size, power * (self.below / 2))
        inside = torch.where(y < self.above, other, u)
        return Drawn(torch.where(up, *ends), torch.where(y > self.below, inside, u))

    def power(self, size: Value) -> Value:
        """The power of two that a size belongs to, or that it may be drawn up to; infinite beyond the largest."""
        # The margin keeps the product of the lower end of a gap from being rounded below a power of two.
        return power_of_block(size * fp32(2 / self.below * (1 + 2**-22)), self.least)

    def largest(self, size: torch.Tensor) -> torch.Tensor:
        """The largest power of two that the block of each element may have."""
        powers: torch.Tensor = self.power(block_max(size, BLOCK)).clamp(max=2.0**127)
        return powers


@dataclass(frozen=True)
class Curve:
    """Roots by `halvings` square roots, from `origin` on; codes are `step` apart."""

    halvings: int
    origin: float
    step: float

    @property
    def linear(self) -> float:
        """What is added before the roots are taken."""
        exact: float = self.origin ** (1 << self.halvings)
        return exact

    def code(self, y: Value) -> Value:
        """The code of a number that is not negative, before it is rounded."""
        root = y + self.linear if self.origin else y
        for _ in range(self.halvings):
            root = sqrt(root)
        return (root - self.origin if self.origin else root) * fp32(1 / self.step)

    def value(self, code: Value) -> Value:
        """The number of a code that is not negative."""
        return self._power(code) - self.linear if self.origin else self._power(code)

    def drawn(self, y: Value, u: Value, storage: str) -> Value:
        """One of the two codes beside a number, so that the number is the expectation of their values.

        `u` is uniform above 0 and below 1. The value of a code is drawn as this code, even if its root is rounded.
        """
        below = round_to(self.code(y) - 0.5, storage)  # of a whole number maybe the one before it, and then always up
        low, high = self.value(below), self.value(below + 1.0)
        return below + widen(u * (high - low) < y - low)

    def scaled(self, code: Value, unit: Value) -> Value:
        """The number of a code in units of a power of two, NaN in units of infinity."""
        # Both products are exact, so a compiler that contracts one and the difference (XLA's for CPUs) changes no bit.
        # Without an origin too: of an infinite unit it is NaN, where the product alone would be infinite.
        return self._power(code) * unit - self.linear * unit

    def _power(self, code: Value) -> Value:
        power = code * fp32(self.step) + self.origin if self.origin else code * fp32(self.step)
        for _ in range(self.halvings):
            power = power * power
        return power

    def gap(self, most: float, low: float, least: float) -> Gap:
        """What lies between the largest code of a power of two and the smallest one of the next."""
        ends = torch.tensor([most, low], dtype=torch.float32, device="cpu")
        below, above = self.value(ends).tolist()  # as `decode` rounds them
        return Gap(below / 2, above, least)

    def error(self, size: torch.Tensor, power: torch.Tensor, off: float) -> torch.Tensor:
        """The largest error of a code that is off by `off`, for values of magnitude `size` beside a power of two."""
        half = power.double() / 2
        root = (size.double() / half + self.linear) ** (0.5**self.halvings)
        q = 1 << self.halvings
        most: torch.Tensor = half * ((root + off * self.step) ** q - root**q)
        return most


def uniform(random: Value) -> Value:
    """Uniform above 0 and below 1, for 0 to 65535: the middles of 65536 intervals, so that the mean is exactly 1/2."""
    return (widen(random) + 0.5) * 2.0**-16


@dataclass(frozen=True)
class RootWords:
    """Codes that are roots, beside the power of two of their block."""

    storage: str
    """That of the code; 16 bits without a sign are stored as an int16's."""
    curve: Curve
    most: float
    """The largest code."""
    low: float
    """The smallest code of what is P or more."""
    least: float
    """The smallest P."""
    off: float
    """The largest error of storing a value, in codes: a half to nearest, one if stochastic."""
    floor: float = 0.0
    """The smallest code of what is not 0, where codes have no sign."""

    @cached_property
    def gap(self) -> Gap:
        return self.curve.gap(self.most, self.low, self.least)

    @property
    def is_nearest(self) -> bool:
        """Returns True if values are stored to nearest, and not drawn."""
        return self.off == 0.5

    @property
    def signed(self) -> bool:
        """Returns True if there are codes of negative numbers."""
        return not self.floor

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest: its code, and its block's power of two."""
        size = x if self.signed else magnitudes(x)
        power = power_of_block(block_max(size, BLOCK), self.least)
        y = size * inverse_power_of_two(power)
        if self.signed:  # `step` is such that the limits are kept
            return self._words(x, self.curve.code(torch.abs(y)), power)
        code = round_to(self.curve.code(y), self.storage)
        return self._words(x, self._limited(code, size, size, power, 2.0), power)

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535."""
        # Chances are exactly 0 and 1 for the value of a code, whichever of two codes is the one below it, since values
        # are computed as `decode` computes them: what was decoded, and zero, is drawn as the same words.
        size = torch.abs(x) if self.signed else magnitudes(x)
        top, u = self.gap.draw(size, uniform(random), uniform(random if other is None else other))
        power = power_of_block(block_max(top, BLOCK), self.least)
        code = self.curve.drawn(size * inverse_power_of_two(power), u, self.storage)
        return self._words(x, self._limited(code, size, top, power, self.gap.above), power)

    def _limited(self, code: Value, size: Value, top: Value, power: Value, above: float) -> Value:
        """A code that is at most the largest, and at least the smallest of what is not 0, or of what is P or more."""
        code = torch.where(code > self.most, self.most, code)
        is_large = widen(top * inverse_power_of_two(power) >= above)
        if self.signed:
            return torch.maximum(code, is_large * self.low)
        return torch.maximum(code, widen(size > 0.0) * self.floor + is_large * (self.low - self.floor))

    def _words(self, x: Value, code: Value, power: Value) -> Sequence[Value]:
        storage = self.storage
        if self.signed:
            code = torch.sign(x) * code
        elif storage == "uint16":
            code, storage = code - widen(code > 32767.0) * 65536.0, "int16"
        return [narrow(round_to(code, storage), storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        code, power = map(widen, words)
        if self.signed:
            return self.curve.scaled(torch.abs(code), torch.sign(code) * (power * 0.5))
        if self.storage == "uint16":
            code = code + widen(code < 0.0) * 65536.0
        return self.curve.scaled(code, power * 0.5)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: a code, and what becomes the smallest one."""
        power = self.gap.largest(size)
        most = self.curve.error(size, power, self.off)
        if self.floor:
            most = most + power.double() / 2 * self.curve.value(self.floor)
        return most.float()


ROOTS: Mapping[str, RootWords] = {
    # Without an origin `step` is no short fraction: 4**(1/q) over the code that 2 * P would have, which is a little
    # more than the largest, so that no code means 2 * P or more, and such that P is rounded up.
    "i16q4": RootWords("int16", Curve(2, 0.0, 2**0.5 / 32767.25), 32767.0, 27554.0, 2.0**-67, off=0.5),
    "i8q4": RootWords("int8", Curve(2, 0.0, 2**0.5 / (127.25 - 2**-4)), 127.0, 107.0, 2.0**-67, off=1.0),
    "u16q8": RootWords(
        "uint16", Curve(3, 0.0, 4**0.125 / (65317.0 + 2**-5)), 65317.0, 59896.0, 2.0**-77, off=1.1, floor=1024.0
    ),
    "i16q8": RootWords("int16", Curve(3, 2**-6, 151 * 2**-22), 32598.0, 29857.0, 2.0**-71, off=0.5),
    "i8q8": RootWords("int8", Curve(3, 2**-3, 69 * 2**-13), 126.0, 115.0, 2.0**-100, off=1.0),
    "u16q16": RootWords("uint16", Curve(4, 2**-3, 31 * 2**-21), 65316.0, 62189.0, 2.0**-77, off=1.1, floor=896.0),
    "u8q16": RootWords("uint8", Curve(4, 2**-3, 31 * 2**-13), 255.0, 243.0, 2.0**-76, off=1.1, floor=1.0),
}
"""The words of each format of roots, by its name."""
