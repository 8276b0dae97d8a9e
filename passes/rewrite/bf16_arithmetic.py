"""The arithmetic "bf16", which is the paper's: every operation rounds to bf16, states of two words are expansions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron.numerics.eft import Expansion, bf16, grow, half_a_place, scale, widen
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, Increments, Reader, lift
from collage_neuron.passes.rewrite.arithmetic import Accumulator, Arithmetic, times

if TYPE_CHECKING:
    from collage_neuron.numerics.formats import Format


class Bf16Arithmetic(Arithmetic):
    """Every operation rounds to bf16; states of format bf16x2 are expansions."""

    name = "bf16"
    literal = "hi"

    def round(self, x: Fp32) -> Fp32:
        return bf16(x)

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        if len(components) == 1:
            value = widen(components[0])
            # A gradient may be fp32, and operands of this arithmetic are numbers of bf16.
            return bf16(value) if name == "grad" else Word(value) if name == "param" else value
        hi, lo = map(widen, components)
        if name != "param":
            return Pair(Expansion(hi, lo))
        return PairSum(Expansion(hi, bf16(half_a_place(hi, lo))))  # which is a number of bf16 already


@dataclass(frozen=True)
class Word(Accumulator):
    """The parameter as one bf16 number: every operation on it rounds."""

    value: Fp32
    increments: Increments = ()

    def plus(self, a: Arithmetic, increment: Fp32) -> Word:
        return self._becomes(self.value + increment, lambda: increment)

    def times(self, a: Arithmetic, factor: Fp32) -> Fp32:
        return bf16(self.value * factor)

    def scaled(self, a: Arithmetic, factor: Scalar) -> Word:
        return self._becomes(self.value * a.read(factor), lambda: self.value * a.read(factor - 1))

    def divided(self, a: Arithmetic, divisor: Scalar) -> Word:
        return self._becomes(self.value / a.read(divisor), lambda: self.value * a.read(1 / divisor - 1))

    def _becomes(self, value: Fp32, increment: Callable[[], Fp32]) -> Word:
        return Word(bf16(value), (*self.increments, increment))

    def read(self, a: Reader) -> Fp32:
        return self.value

    def off_path(self, a: Reader) -> Fp32:
        return self.value


class Expanded(Accumulator):
    """A value kept as an expansion; operations that choose between two such values choose whole expansions."""

    @property
    def settled(self) -> Expansion:
        """The expansion itself."""
        raise NotImplementedError

    def read(self, a: Reader) -> Fp32:
        return self.settled.hi

    def words(self, a: Reader) -> Expansion:
        return self.settled

    def kept(self, components: int) -> Sequence[Fp32]:
        return self.settled if components == 2 else ()

    def on_maximum(self, a: Arithmetic, x: Any, y: Any) -> Pair:
        return Pair(larger(expansion(a, x), expansion(a, y)))

    def on_minimum(self, a: Arithmetic, x: Any, y: Any) -> Pair:
        return Pair(smaller(expansion(a, x), expansion(a, y)))

    def on_where(self, a: Arithmetic, mask: Any, x: Any, y: Any) -> Pair:
        return Pair(choose(a.truth(mask), expansion(a, x), expansion(a, y)))

    def on_lerp(self, a: Arithmetic, x: Any, y: Any, weight: Any) -> Any:
        host = lift(weight).host
        return NotImplemented if x is not self or host is None else self.toward(a, y, host)

    def toward(self, a: Arithmetic, y: Any, weight: Scalar) -> Any:
        """x + weight * (y - x)."""
        u, v = self.settled, expansion(a, y)
        # High words that are near each other cancel, and then the low words are what is left of the difference.
        gap = bf16(bf16(v.hi - u.hi) + bf16(v.lo - u.lo))
        if a.is_far(1 - weight):
            return Pair(v).plus(a, -times(a, gap, 1 - weight))
        return self.plus(a, times(a, gap, weight))


@dataclass(frozen=True)
class Pair(Expanded):
    """A state kept as an expansion: decays by `scale`, accumulates by `grow`."""

    pair: Expansion

    def plus(self, a: Arithmetic, increment: Fp32) -> Pair:
        return Pair(grow(self.pair, bf16(increment)))

    def times(self, a: Arithmetic, factor: Fp32) -> Pair:
        return Pair(scale(self.pair, Expansion(bf16(factor), 0.0)))

    def scaled(self, a: Arithmetic, factor: Scalar) -> Pair:
        return Pair(scale(self.pair, expansion(a, factor)))

    def toward(self, a: Arithmetic, y: Any, weight: Scalar) -> Any:
        """(1 - weight) * x + weight * y, with 1 - weight from the host; for another expansion y, by the difference."""
        if isinstance(y, Expanded):
            return super().toward(a, y, weight)
        return self.scaled(a, 1 - weight).plus(a, times(a, y, weight))

    @property
    def settled(self) -> Expansion:
        return self.pair


@dataclass(frozen=True)
class PairSum(Expanded):
    """The parameter as an expansion: increments are summed first and grown into it once.

    `p * s` is the increment `p.hi * (s - 1)`: the compact weight decay of the paper's released AdamW. Where s is far
    from 1 (`is_far`) it is the product of expansions.
    """

    base: Expansion
    delta: Fp32 | None = None
    grown: Increments = ()
    """The increments that were grown into `base` before."""

    def plus(self, a: Arithmetic, increment: Fp32) -> PairSum:
        rounded = bf16(increment)  # one addition less than growing each: the order of the released AdamW
        total = rounded if self.delta is None else bf16(rounded + self.delta)
        return PairSum(self.base, total, self.grown)

    def times(self, a: Arithmetic, factor: Fp32) -> Pair:
        return Pair(self.settled).times(a, factor)

    def scaled(self, a: Arithmetic, factor: Scalar) -> PairSum | Pair:
        if a.is_far(factor):
            return Pair(self.settled).scaled(a, factor)
        decay = self.settled.hi * a.read(factor - 1)
        return PairSum(self.settled, None, self.increments).plus(a, decay)

    @property
    def increments(self) -> Increments:
        """The sums that were grown into the parameter."""
        return self.grown if self.delta is None else (*self.grown, lambda: self.delta)

    def off_path(self, a: Reader) -> Fp32:
        # The paper's update reads the high word wherever the parameter is not what is updated.
        return self.read(a)

    @property
    def settled(self) -> Expansion:
        """The expansion after growing the pending increments into it."""
        return self.base if self.delta is None else grow(self.base, self.delta)


def expansion(a: Arithmetic, x: Any) -> Expansion:
    """Any operand as an expansion."""
    return Expansion(*lift(x).words(a))


def choose(mask: Fp32, x: Expansion, y: Expansion) -> Expansion:
    """x where the mask is true, else y."""
    return Expansion(torch.where(mask, x.hi, y.hi), torch.where(mask, x.lo, y.lo))


def larger(x: Expansion, y: Expansion) -> Expansion:
    """The larger of two expansions, NaN if either is NaN; they compare as numbers, high words first."""
    low = torch.logical_and(x.hi == y.hi, x.lo >= y.lo)  # low words decide where high ones are equal, and only there
    # A NaN makes all comparisons false: that of y is chosen so, and that of x by itself.
    return choose(torch.logical_or(torch.logical_or(x.hi > y.hi, low), x.hi != x.hi), x, y)


def smaller(x: Expansion, y: Expansion) -> Expansion:
    """The smaller of two expansions, NaN if either is NaN."""
    low = torch.logical_and(x.hi == y.hi, x.lo <= y.lo)
    return choose(torch.logical_or(torch.logical_or(x.hi < y.hi, low), x.hi != x.hi), x, y)
