"""The numbers that a step computes from values that it reads from tensors (`.item()`), each under a name of its own.

Given: `alpha = max(1e-3, p.norm().item()) * rate`, with the larger one taken from the norm
Result: `0: read(0)`, `1: host(0.01)`, `2: mul(0, 1)`

Such a number has no value while a step is recorded. What is computed in the same way has the same name, also in another
recording of the same step (`outcomes`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

READ, HOST = "read", "host"
"""The kinds of numbers that are not computed: read from a tensor, and known to Python."""


class Made(NamedTuple):
    """A number of the table, as an argument of a recorded operation or of another number."""

    number: int


class Computation(NamedTuple):
    """How a number is found."""

    target: Any
    """An aten operation on numbers; or READ, with the place of the tensor among those that were read; or HOST."""
    args: tuple[Any, ...]
    """Numbers of the table (`Made`) and constants of the operation."""


class Numbers:
    """The table; a number is computed from earlier ones only."""

    def __init__(self) -> None:
        self.computations: list[Computation] = []
        self._known: dict[Any, Made] = {}

    def add(self, target: Any, *args: Any) -> Made:
        """The number that `target` computes of `args`."""
        key = target, tuple((type(x), repr(x)) for x in args)  # as text: equal for equal doubles, and 0.0 is not -0.0
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Made(len(self.computations))
            self.computations.append(Computation(target, args))
        return found

    def host(self, value: float) -> Made:
        """A number that Python knows."""
        return self.add(HOST, float(value))

    def is_rounded(self, number: Made) -> bool:
        """Returns True if an fp32 rounding is in it, where Python's double has none: not for what is read, or given."""
        target, args = self.of(number)
        if target in (aten.neg.default, aten.abs.default):
            return self.is_rounded(args[0])
        if target in (aten.mul.Tensor, aten.div.Tensor) and self._is_power_of_two(args[1]):
            return self.is_rounded(args[0])
        if target is aten.mul.Tensor and self._is_power_of_two(args[0]):
            return self.is_rounded(args[1])
        return target not in (READ, HOST)

    def is_far(self, number: Made) -> bool:
        """Returns True if a factor that is far from 1 is in it."""
        target, args = self.of(number)
        if target is HOST:
            return bool(args[0]) and math.isfinite(args[0]) and not 2.0**-32 <= abs(args[0]) <= 2.0**32
        return any(self.is_far(x) for x in args if type(x) is Made)

    def _is_power_of_two(self, number: Made) -> bool:
        target, args = self.of(number)
        return target is HOST and math.frexp(args[0])[0] in (0.5, -0.5)

    def of(self, number: Made) -> Computation:
        """How a number is found."""
        return self.computations[number.number]
