"""Codes of blocks that are eighth and sixteenth roots, for elements whose magnitudes differ widely within a block.

Blocks and their power of two P are those of `block_words`. With y = 2 * |x| / P, from 2**1 to 2**2 for the largest::

    code = round(((y + o**q)**(1/q) - o) / step),   |x| = P / 2 * ((step * code + o)**q - o**q)

Roots alone have many codes for numbers near 0, which nobody needs: o**q is where the codes become equally spaced. It
and `step` are short fractions of powers of two, so that step * code + o is exact, and 0 is.

| | q | codes | spacing | equally spaced below | smallest |
|---|---|---|---|---|---|
| `i16q8`, averages, nearest | 8 | -32598 to 32598 | 2**-12.1 f**-1/8 | 2**-48 | 2**-55 |
| `i8q8`, averages, stochastic | 8 | -126 to 126 | 2**-4.1 f**-1/8 | 2**-24 | 2**-26 |
| `u16q16`, second moments, stochastic | 16 | 896 to 65316, and 0 | 2**-12.1 f**-1/16 | 2**-48 | 2**-48 |
| `u8q16`, second moments, stochastic | 16 | 0 to 255 | 2**-4.1 f**-1/16 | 2**-48 | 2**-51 |

(spacing relative to an element that is a fraction f of 2 * P; the others against 2 * P.) Elements with a scale for
each row and each column of a matrix span 2**20 within a block, their squares 2**40. There fourth roots of averages and
eighth roots of second moments are two to three times less accurate; elsewhere they are a little more accurate.

The largest element of a block is never stored as less than P, nor as 2 * P or more, so that P stays: for `i16q8`, and
`i8q8` to nearest, by the choice of `step`; otherwise by limits on the code. Drawn, it crosses from one power of two to
another with its chance (`power_gaps`). All are drawn between the values of two codes, so that an average moves at its
rate in expectation, whatever its codes are. Drawn between the codes themselves, which are roots, every store would be
too large in expectation: where the chance of going up is f, by f * (1 - f) / 2 * h**2 for codes that are h apart, since
roots curve. Averages of `u8q16` with b = .999 were 2 to 4 % too large that way.

Codes without a sign store nothing that is not 0 as 0. What lies between 0 and the smallest code becomes that code, too
large: an average that decays ends there, and small values in the block of a very large one are held there.

`i16q8` rounds to nearest, so an average that decays by b a step where gradients are 0 stands still in the end: for
b = .9 at 2**-53 of 2 * P, for .99 at 2**-48, for .999 at 2**-24. The root of the smallest second moment is 2**-24 of
that of 2 * P, so the quotient ends below that of the largest elements for every b up to .999.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from collage_neuron.numerics.blocks import BLOCK
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
from collage_neuron.numerics.power_gaps import Gap


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
        root = y + self.linear
        for _ in range(self.halvings):
            root = sqrt(root)
        return (root - self.origin) * fp32(1 / self.step)

    def value(self, code: Value) -> Value:
        """The number of a code that is not negative."""
        return self._power(code) - self.linear

    def drawn(self, y: Value, u: Value, storage: str) -> Value:
        """One of the two codes beside a number, so that the number is the expectation of their values.

        `u` is uniform above 0 and below 1. The value of a code is drawn as this code, even if its root is rounded.
        """
        below = round_to(self.code(y) - 0.5, storage)  # of a whole number maybe the one before it, and then always up
        low, high = self.value(below), self.value(below + 1.0)
        return below + widen(u * (high - low) < y - low)

    def scaled(self, code: Value, unit: Value) -> Value:
        """The number of a code in units of a power of two.

        Both products are exact, so a compiler that contracts one and the difference (XLA's for CPUs) changes no bit.
        """
        return self._power(code) * unit - self.linear * unit

    def _power(self, code: Value) -> Value:
        power = code * self.step + self.origin
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
        found: torch.Tensor = half * ((root + off * self.step) ** q - root**q)
        return found


def uniform(random: Value) -> Value:
    """Uniform above 0 and below 1, for 0 to 65535: the middles of 65536 intervals, so that the mean is exactly 1/2."""
    return (widen(random) + 0.5) * 2.0**-16


@dataclass(frozen=True)
class SignedRoot:
    """Codes with a sign, of averages."""

    storage: str
    curve: Curve
    most: float
    """The largest code."""
    low: float
    """The smallest code of what is P or more."""
    least: float
    """The smallest P."""
    off: float
    """The largest error of storing a value, in codes: a half to nearest, one if stochastic."""

    @cached_property
    def gap(self) -> Gap:
        return self.curve.gap(self.most, self.low, self.least)

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest: its code, and its block's power of two."""
        power = power_of_block(block_max(x, BLOCK), self.least)
        code = self.curve.code(torch.abs(x * inverse_power_of_two(power)))
        return [narrow(round_to(torch.sign(x) * code, self.storage), self.storage), narrow(power, "fp32")]

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535.

        What was decoded, and zero, is drawn as the same words: `block_words.FourthRoot.draw` says why.
        """
        size = torch.abs(x)
        top, u = self.gap.draw(size, uniform(random), uniform(random if other is None else other))
        power = power_of_block(block_max(top, BLOCK), self.least)
        y = size * inverse_power_of_two(power)
        code = self.curve.drawn(y, u, self.storage)
        code = torch.where(code > self.most, self.most, code)
        code = torch.maximum(code, widen(top * inverse_power_of_two(power) >= self.gap.above) * self.low)
        return [narrow(round_to(torch.sign(x) * code, self.storage), self.storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        code, power = map(widen, words)
        return self.curve.scaled(torch.abs(code), torch.sign(code) * (power * 0.5))

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`."""
        return self.curve.error(size, self.gap.largest(size), self.off).float()


@dataclass(frozen=True)
class UnsignedRoot:
    """Codes of numbers that are not negative."""

    storage: str
    """That of the code; 16 bits are stored as an int16's."""
    curve: Curve
    most: float
    """The largest code."""
    low: float
    """The smallest code of what is P or more."""
    floor: float
    """The smallest code of what is not 0."""
    least: float
    """The smallest P."""

    @cached_property
    def gap(self) -> Gap:
        return self.curve.gap(self.most, self.low, self.least)

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value, to nearest."""
        size = magnitudes(x)
        return self._words(size, size, 2.0, lambda y: round_to(self.curve.code(y), self.storage))

    def draw(self, x: Value, random: Value, other: Value | None = None) -> Sequence[Value]:
        """The words of an fp32 value, stochastically; `random`, and `other`, are uniform in 0 to 65535.

        What was decoded, and zero, is drawn as the same words.
        """
        size = magnitudes(x)
        top, u = self.gap.draw(size, uniform(random), uniform(random if other is None else other))
        return self._words(size, top, self.gap.above, lambda y: self.curve.drawn(y, u, self.storage))

    def _words(self, size: Value, top: Value, above: float, coded: Callable[[Value], Value]) -> Sequence[Value]:
        """Words of sizes, in blocks whose powers follow from `top`; that of `above` or more is `low` or more."""
        power = power_of_block(block_max(top, BLOCK), self.least)
        code = coded(size * inverse_power_of_two(power))
        code = torch.where(code > self.most, self.most, code)
        large = widen(top * inverse_power_of_two(power) >= above)
        code = torch.maximum(code, widen(size > 0.0) * self.floor + large * (self.low - self.floor))
        if self.storage == "uint16":
            code, storage = code - widen(code > 32767.0) * 65536.0, "int16"
        else:
            storage = self.storage
        return [narrow(round_to(code, storage), storage), narrow(power, "fp32")]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of a code and of its block's power of two."""
        code, power = map(widen, words)
        if self.storage == "uint16":
            code = code + widen(code < 0.0) * 65536.0
        return self.curve.scaled(code, power * 0.5)

    def error(self, size: torch.Tensor) -> torch.Tensor:
        """The largest error of storing values of magnitude `size`: a code, and what becomes the smallest one."""
        power = self.gap.largest(size)
        found: torch.Tensor = self.curve.error(size, power, 1.1) + power.double() / 2 * self.curve.value(self.floor)
        return found.float()


I16Q8 = SignedRoot("int16", Curve(3, 2**-6, 151 * 2**-22), most=32598.0, low=29857.0, least=2.0**-71, off=0.5)
I8Q8 = SignedRoot("int8", Curve(3, 2**-3, 69 * 2**-13), most=126.0, low=115.0, least=2.0**-100, off=1.0)
U16Q16 = UnsignedRoot("uint16", Curve(4, 2**-3, 31 * 2**-21), most=65316.0, low=62189.0, floor=896.0, least=2.0**-77)
U8Q16 = UnsignedRoot("uint8", Curve(4, 2**-3, 31 * 2**-13), most=255.0, low=243.0, floor=1.0, least=2.0**-76)
