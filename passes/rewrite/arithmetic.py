"""Arithmetics: how states are loaded, how results round, and how operands are read as plain values.

There are two. "fp32", in this file, keeps fp32 numbers between load and store, and only stores round to narrower types;
"bf16" is the paper's (`bf16_arithmetic`). They load states as values (`passes/ir/values.py`), which define their own
operations.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from collage_neuron.numerics.eft import widen
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, Increments, Reader, Value, lift

if TYPE_CHECKING:
    from collage_neuron.numerics.formats import Format


class Arithmetic:
    """Base of all. `scalar(form, s)` gives the graph's input for a host scalar.

    `far` are the host scalars that are nearer to 0 than to 1 (`is_far`).
    """

    name: ClassVar[str]
    literal: ClassVar[str] = "fp32"
    """The form of a host scalar that may be the result of an operation without rounding."""

    def __init__(self, scalar: Callable[[str, Scalar], Fp32], far: Collection[Scalar] = ()) -> None:
        self.scalar, self.far = scalar, far
        self.decisive: dict[Scalar, None] = {}
        """The host scalars of which it was asked if they are far: the form of the update depends on them."""

    def is_far(self, factor: Scalar) -> bool:
        """Returns True for a factor of less than a half: `x + x * (factor - 1)` would cancel most of x."""
        self.decisive[factor] = None
        return factor in self.far

    def round(self, x: Fp32) -> Fp32:
        """The rounding that follows every operation on plain values."""
        raise NotImplementedError

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        """The value of the stored state `name` at the start of the update."""
        raise NotImplementedError

    def read(self, x: Any) -> Fp32:
        """Any operand as a plain fp32 value (or a literal number)."""
        return lift(x).read(self)

    def truth(self, x: Any) -> Fp32:
        """Any operand as a mask; numbers other than 0 are true."""
        mask = lift(x).mask
        return self.read(x) != 0 if mask is None else mask

    def choice(self, x: Any) -> Fp32:
        """An operand that may itself be the result, without rounding: of where, maximum and similar operations."""
        # Nothing rounds the result of a choice, so in bf16 arithmetic a number of the host is taken rounded.
        host = lift(x).host
        return self.read(x) if host is None else self.scalar(self.literal, host)


@dataclass(frozen=True)
class Mask(Value):
    """The boolean result of an operation; read as a number it is 1 or 0."""

    elements: Fp32

    def read(self, a: Reader) -> Fp32:
        return widen(self.elements)

    @property
    def mask(self) -> Fp32:
        return self.elements


def computed(a: Arithmetic, x: Any) -> Fp32:
    """An operand as a plain value that has bits: a literal number becomes one of the step."""
    return a.scalar("fp32", Scalar.constant(float(x))) if isinstance(x, (int, float)) else lift(x).read(a)


def times(a: Arithmetic, x: Any, y: Any) -> Fp32:
    """x * y before rounding; a factor of 1 multiplies nothing."""
    # Only the factors that operations have by default are left out: a number of the step may be another in the next.
    x, y = a.read(x), a.read(y)
    return x if isinstance(y, int) and y == 1 else -x if isinstance(y, int) and y == -1 else x * y


def total_increment(x: Any) -> Fp32 | None:
    """The raw update that leads to the new parameter `x`; None if the update replaces the parameter instead."""
    parts = [increment() for increment in lift(x).increments]  # only now: what is not measured is not in the graph
    return functools.reduce(operator.add, parts) if parts else None


class Accumulator(Value):
    """A state between its old and its new value; `plus` and the methods after it define how it changes.

    A small increment of a state must not be lost, and must not be rounded more often than needed. So an accumulator
    takes over the operations that add, multiply and divide; each kind of accumulator defines how it adds.
    """

    def plus(self, a: Arithmetic, increment: Fp32) -> Any:
        """The state after adding the plain value `increment`, which is not rounded yet."""
        raise NotImplementedError

    def times(self, a: Arithmetic, factor: Fp32) -> Any:
        """The state after multiplying by a plain value."""
        raise NotImplementedError

    def scaled(self, a: Arithmetic, factor: Scalar) -> Any:
        """The state after multiplying by a host scalar."""
        raise NotImplementedError

    def divided(self, a: Arithmetic, divisor: Scalar) -> Any:
        """The state after dividing by a host scalar."""
        return self.scaled(a, 1 / divisor)

    def on_add_to(self, a: Arithmetic, x: Any, increment: Fp32) -> Any:
        return self.plus(a, increment)

    def on_add(self, a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
        if x is self:
            return self.plus(a, times(a, y, alpha))
        # With another factor this state is scaled before it is added, and accumulates nothing.
        return self.plus(a, a.read(x)) if isinstance(alpha, int) and alpha == 1 else NotImplemented

    def on_sub(self, a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
        return self.plus(a, -times(a, y, alpha)) if x is self else NotImplemented

    def on_mul(self, a: Arithmetic, x: Any, y: Any) -> Any:
        other = y if x is self else x
        host = lift(other).host
        return self.times(a, a.read(other)) if host is None else self.scaled(a, host)

    def on_div(self, a: Arithmetic, x: Any, y: Any) -> Any:
        host = lift(y).host
        return NotImplemented if x is not self or host is None else self.divided(a, host)


@dataclass(frozen=True)
class Sum(Accumulator):
    """The parameter in fp32 arithmetic: increments are summed first, so that it is rounded once per step.

    If it were rounded after each increment, it would lose the same part of a small weight decay in every step.
    """

    base: Fp32
    delta: Fp32 | None = None
    is_old: bool = True
    """False if `base` is not the parameter before the step, so that its increments are not those of the step."""

    def plus(self, a: Arithmetic, increment: Fp32) -> Sum:
        return Sum(self.base, increment if self.delta is None else self.delta + increment, self.is_old)

    def times(self, a: Arithmetic, factor: Fp32) -> Fp32:
        return self.settled * factor

    def scaled(self, a: Arithmetic, factor: Scalar) -> Sum:
        if a.is_far(factor):  # x + x * (0.1 - 1) would cancel nine tenths of x
            return Sum(self.settled * a.read(factor), None, False)
        # p * s as p + p * (s - 1): rounding s = 1 - lr * weight_decay to fp32 would change the decay by up to 2**-25 /
        # (lr * wd), while s - 1, computed on the host in double, is off by 2**-53 / (lr * wd) at most.
        return self.plus(a, self.settled * a.read(factor - 1))

    @property
    def increments(self) -> Increments:
        """The pending increments; nothing was added before them."""
        return (lambda: self.delta,) if self.is_old and self.delta is not None else ()

    def read(self, a: Reader) -> Fp32:
        return self.settled

    def off_path(self, a: Reader) -> Fp32:
        return self.settled

    @functools.cached_property
    def settled(self) -> Fp32:
        """The value plus the pending increments; written into the graph once, however often it is read."""
        return self.base if self.delta is None else self.base + self.delta


class Fp32Arithmetic(Arithmetic):
    """Values are fp32; the only roundings to narrower types are those of the formats, at the stores."""

    name = "fp32"

    def round(self, x: Fp32) -> Fp32:
        return x

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        value = fmt.decoder(name)(components)
        return Sum(value) if name == "param" else value
