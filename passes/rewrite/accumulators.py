"""Accumulators: values on the path from a state's old contents to its new ones.

A small increment of a state must not be lost, and must not be rounded more often than needed. So an accumulator takes
over the operations that add, multiply and divide; each kind of accumulator defines how it adds.
"""

from __future__ import annotations

from typing import Any

from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, Value, lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, times


class Accumulator(Value):
    """A state between its old and its new value; `plus` and the methods after it define how it changes."""

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
