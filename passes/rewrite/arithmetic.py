"""An arithmetic: what the states of an update start as, how results round, and what any operand is as a plain value.

There are two: `fp32_arithmetic` keeps fp32 numbers between load and store, `bf16_arithmetic` is the paper's. What they
start the states as are values (`passes/ir/values.py`), which answer for themselves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, lift


class Arithmetic:
    """Base of all. `scalar(form, s)` gives the graph's input for a host scalar."""

    name: ClassVar[str]
    literal: ClassVar[str] = "fp32"
    """The form of a host scalar that may be the result of an operation as it is, unrounded."""

    def __init__(self, scalar: Callable[[str, Scalar], Fp32]) -> None:
        self.scalar = scalar

    def round(self, x: Fp32) -> Fp32:
        """What follows every operation on plain values."""
        raise NotImplementedError

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        """The value that the stored state `name` starts the update with."""
        raise NotImplementedError

    def read(self, x: Any) -> Fp32:
        """Any operand as a plain fp32 value (or a literal number)."""
        return lift(x).read(self)

    def truth(self, x: Any) -> Fp32:
        """Any operand as truth values; of numbers, those that are not 0 are true."""
        mask = lift(x).mask
        return self.read(x) if mask is None else mask

    def choice(self, x: Any) -> Fp32:
        """An operand that may be the result as it is, unrounded: of where, maximum and the like."""
        host = lift(x).host
        return self.read(x) if host is None else self.scalar(self.literal, host)


def times(a: Arithmetic, x: Any, y: Any) -> Fp32:
    """x * y before rounding; a factor of 1 multiplies nothing."""
    x, y = a.read(x), a.read(y)
    return x if isinstance(y, int) and y == 1 else -x if isinstance(y, int) and y == -1 else x * y


def total_increment(x: Any) -> Fp32 | None:
    """What the update adds to the parameter, before it is added: `x` is the new one. None if it replaces it instead."""
    parts = [increment() for increment in lift(x).increments]
    return functools.reduce(operator.add, parts) if parts else None
