"""The two arithmetics an update can be expanded in: what a value is, and what an operation on it becomes.

`Fp32` keeps every value an fp32 number between load and store. `Bf16` is the paper's: every value is a bf16
number or an expansion of two, and every operation rounds. Both see three kinds of operand: a plain value, a
host `Scalar`, and a `State`, a value on the path from a state's old contents to its new ones. Only states are
added to with care; whatever else reads a state gets one plain value (`read`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import Expansion, Value, bf16, grow, scale, widen
from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.scalars import Scalar


class State(Protocol):
    """A value on an accumulation path."""

    def plus(self, increment: Value) -> State:
        """The state after adding the fp32 value `increment`."""

    def times(self, factor: Scalar | Value) -> State | Value:
        """The state after multiplying by `factor`."""

    def over(self, divisor: Scalar) -> State:
        """The state after dividing by `divisor`."""

    def read(self) -> Value:
        """The state as one plain value, for operations that do not accumulate into it."""


class Arithmetic:
    """Base of both: how operands become plain values. `scalar(form, s)` gives the graph's input for a host scalar."""

    name = ""

    def __init__(self, scalar: Callable[[str, Scalar], Value]) -> None:
        self.scalar = scalar

    def read(self, x: Any) -> Value:
        """Any operand as a plain fp32 value (or a literal number)."""
        if isinstance(x, Scalar):
            return self.scalar("fp32", x)
        if is_mask(x):
            return widen(x)
        return x if not is_state(x) else x.read()

    def choice(self, x: Any) -> Value:
        """An operand that may be the result as it is, unrounded: where, maximum and the like."""
        return self.read(x)

    def round(self, x: Value) -> Value:
        """What follows every operation on plain values."""
        raise NotImplementedError

    def is_pair(self, x: object) -> bool:
        """Whether `x` is kept as an expansion while the update runs."""
        return isinstance(x, (Pair, PairSum))

    def pick(self, of: Callable[[Expansion, Expansion], Expansion], x: Any, y: Any) -> Pair:
        """The expansion that `of` makes of two operands, at least one of them a pair."""
        return Pair(self, of(self._as_pair(x), self._as_pair(y)))

    def gap(self, x: Any, y: Any) -> Value:
        """y - x of two operands, at least one of them a pair: where the high words cancel, the low words are left."""
        u, v = self._as_pair(x), self._as_pair(y)
        return bf16(bf16(v.hi - u.hi) + bf16(v.lo - u.lo))

    def _as_pair(self, x: Any) -> Expansion:
        if isinstance(x, (Pair, PairSum)):
            return x.settled
        if isinstance(x, Scalar):
            return Expansion(self.scalar("hi", x), self.scalar("lo", x))
        return Expansion(self.read(x), 0.0)

    def load(self, name: str, fmt: Format, components: Sequence[Value]) -> Any:
        """The value that the stored state `name` starts the update with."""
        raise NotImplementedError


def is_state(x: object) -> bool:
    """Whether `x` is on an accumulation path."""
    return isinstance(x, (Word, Sum, Pair, PairSum))


_MASKS = frozenset(
    {operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne}
    | {torch.logical_and, torch.logical_or, torch.logical_not}
)


def is_mask(x: object) -> bool:
    """Whether `x` is the true-or-false result of an operation; read as a number it is 0 or 1."""
    return isinstance(x, fx.Proxy) and x.node.target in _MASKS


def is_param(x: object) -> bool:
    """Whether `x` is the parameter on its way from old to new."""
    return isinstance(x, (Word, Sum, PairSum))


Increments = tuple[Callable[[], Value], ...]
"""What was added to the parameter so far; each is written into the graph only where the update is measured."""


def total_increment(x: Any) -> Value | None:
    """What the update adds to the parameter, before it is added: `x` is the new one. None if it replaces it instead."""
    parts = [increment() for increment in x.increments] if is_param(x) else []
    return functools.reduce(operator.add, parts) if parts else None


@dataclass(frozen=True)
class Sum:
    """The parameter in fp32 arithmetic: increments are summed first, so that it is rounded once a step.

    Rounded after each of them, it would lose the same part of a small weight decay step after step.

    `p * s` is taken as `p + p * (s - 1)`. 1 - lr * weight_decay is so near 1 that its rounding to fp32 would change
    the decay by up to 2**-25 / (lr * wd); s - 1 is computed on the host, in double, and is off by 2**-53 / (lr * wd)
    at most.
    """

    arithmetic: Arithmetic
    base: Value
    delta: Value | None = None

    def plus(self, increment: Value) -> Sum:
        return Sum(self.arithmetic, self.base, increment if self.delta is None else self.delta + increment)

    def times(self, factor: Scalar | Value) -> Sum | Value:
        if not isinstance(factor, Scalar):
            return self.settled * factor
        return self.plus(self.settled * self.arithmetic.read(factor - 1))

    def over(self, divisor: Scalar) -> Sum | Value:
        return self.times(1 / divisor)

    @property
    def increments(self) -> Increments:
        """What is pending: nothing was added before."""
        return () if self.delta is None else (lambda: self.delta,)

    def read(self) -> Value:
        return self.settled

    @functools.cached_property
    def settled(self) -> Value:
        """The value with what is pending added to it; written into the graph once, whoever reads it."""
        return self.base if self.delta is None else self.base + self.delta


class Fp32(Arithmetic):
    """Values are fp32; the only roundings below that are the formats' own, at the stores."""

    name = "fp32"

    def round(self, x: Value) -> Value:
        return x

    def load(self, name: str, fmt: Format, components: Sequence[Value]) -> Any:
        value = fmt.decode(components)
        return Sum(self, value) if name == "param" else value


@dataclass(frozen=True)
class Pair:
    """A state kept as an expansion, in the paper's arithmetic: decays by `scale`, accumulates by `grow`."""

    arithmetic: Arithmetic
    pair: Expansion

    def plus(self, increment: Value) -> Pair:
        return Pair(self.arithmetic, grow(self.pair, bf16(increment)))

    def times(self, factor: Scalar | Value) -> Pair:
        if isinstance(factor, Scalar):
            words = Expansion(self.arithmetic.scalar("hi", factor), self.arithmetic.scalar("lo", factor))
        else:
            words = Expansion(bf16(factor), 0.0)
        return Pair(self.arithmetic, scale(self.pair, words))

    def over(self, divisor: Scalar) -> Pair:
        return self.times(1 / divisor)

    def read(self) -> Value:
        return self.pair.hi

    @property
    def settled(self) -> Expansion:
        """The expansion itself."""
        return self.pair


@dataclass(frozen=True)
class Word:
    """The parameter as one bf16 number, in the paper's arithmetic: every operation on it rounds."""

    arithmetic: Arithmetic
    value: Value
    increments: Increments = ()

    def plus(self, increment: Value) -> Word:
        return self._becomes(self.value + increment, lambda: increment)

    def times(self, factor: Scalar | Value) -> Word | Value:
        if not isinstance(factor, Scalar):
            return bf16(self.value * factor)
        read = self.arithmetic.read
        return self._becomes(self.value * read(factor), lambda: self.value * read(factor - 1))

    def over(self, divisor: Scalar) -> Word:
        read = self.arithmetic.read
        return self._becomes(self.value / read(divisor), lambda: self.value * read(1 / divisor - 1))

    def _becomes(self, value: Value, increment: Callable[[], Value]) -> Word:
        return Word(self.arithmetic, bf16(value), (*self.increments, increment))

    def read(self) -> Value:
        return self.value


@dataclass(frozen=True)
class PairSum:
    """The parameter as an expansion: increments are summed first and grown into it once.

    `p * s` is the increment `p.hi * (s - 1)`: the compact weight decay of the paper's released AdamW.
    """

    arithmetic: Arithmetic
    base: Expansion
    delta: Value | None = None
    grown: Increments = ()
    """What was grown into `base` before."""

    def plus(self, increment: Value) -> PairSum:
        rounded = bf16(increment)
        total = rounded if self.delta is None else bf16(rounded + self.delta)
        return PairSum(self.arithmetic, self.base, total, self.grown)

    def times(self, factor: Scalar | Value) -> PairSum | Pair:
        if not isinstance(factor, Scalar):
            return Pair(self.arithmetic, self.settled).times(factor)
        decay = self.settled.hi * self.arithmetic.read(factor - 1)
        return PairSum(self.arithmetic, self.settled, None, self.increments).plus(decay)

    def over(self, divisor: Scalar) -> PairSum | Pair:
        return self.times(1 / divisor)

    @property
    def increments(self) -> Increments:
        """The sums that were grown into the parameter."""
        return self.grown if self.delta is None else (*self.grown, lambda: self.delta)

    def read(self) -> Value:
        return self.settled.hi

    @property
    def settled(self) -> Expansion:
        """The expansion with what is pending grown into it."""
        return self.base if self.delta is None else grow(self.base, self.delta)


class Bf16(Arithmetic):
    """The paper's arithmetic: every operation rounds to bf16; states of format bf16x2 are expansions."""

    name = "bf16"

    def choice(self, x: Any) -> Value:
        return self.scalar("hi", x) if isinstance(x, Scalar) else self.read(x)

    def round(self, x: Value) -> Value:
        return bf16(x)

    def load(self, name: str, fmt: Format, components: Sequence[Value]) -> Any:
        if len(components) == 1:
            value = widen(components[0])
            return bf16(value) if name == "grad" else Word(self, value) if name == "param" else value
        pair = Expansion(*map(widen, components))
        return PairSum(self, pair) if name == "param" else Pair(self, pair)


ARITHMETICS: dict[str, type[Arithmetic]] = {a.name: a for a in (Fp32, Bf16)}


def choose(mask: Value, x: Expansion, y: Expansion) -> Expansion:
    """x where the mask is true, else y."""
    return Expansion(torch.where(mask, x.hi, y.hi), torch.where(mask, x.lo, y.lo))


def larger(x: Expansion, y: Expansion) -> Expansion:
    """The larger of two expansions, NaN if either is: they compare as numbers, high words first."""
    low = torch.logical_and(x.hi == y.hi, x.lo >= y.lo)
    return choose(torch.logical_or(torch.logical_or(x.hi > y.hi, low), x.hi != x.hi), x, y)


def smaller(x: Expansion, y: Expansion) -> Expansion:
    """The smaller of two expansions, NaN if either is."""
    low = torch.logical_and(x.hi == y.hi, x.lo <= y.lo)
    return choose(torch.logical_or(torch.logical_or(x.hi < y.hi, low), x.hi != x.hi), x, y)
