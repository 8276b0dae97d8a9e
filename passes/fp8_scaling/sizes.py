"""The size of a value: the binary logarithm of its expected root mean square, and how sizes combine.

Elements are taken to be independent and centred, which is what makes a sum of n of them sqrt(n) times as large. Values
that cannot be negative add up to n times as much, so a size remembers if it is one of those.

`RULES` has one rule for each operation, by which the size of a result follows from those of the operands. An operation
without a rule makes its result unknown, and so everything that is computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.fx import Node

from collage_neuron.passes.rewrite.rules.table import registering


class Size(NamedTuple):
    """Values of root mean square 2**log; -inf for zeros."""

    log: float
    positive: bool = False
    """No value is negative."""
    peak: float = 0.0
    """The logarithm of largest magnitude over root mean square, where a scale should leave room for that."""

    def times(self, factor: float) -> Size:
        """The size after a multiplication by a positive number."""
        return Size(self.log + math.log2(factor), self.positive)

    def signed(self) -> Size:
        """The same magnitude, of values of either sign."""
        return Size(self.log)


def of_number(x: float) -> Size:
    """The size of a constant."""
    return Size(math.log2(abs(x)) if x else -math.inf, x >= 0)


def added(*sizes: Size) -> Size:
    """Of a sum of independent values: their squares add up, or they themselves if none is negative."""
    positive = all(s.positive for s in sizes)
    power = 1 if positive else 2
    largest = max(s.log for s in sizes)
    if math.isinf(largest):
        return Size(largest, positive)
    return Size(largest + math.log2(sum(2.0 ** (power * (s.log - largest)) for s in sizes)) / power, positive)


def multiplied(*sizes: Size) -> Size:
    """Of a product of independent values."""
    return Size(sum(s.log for s in sizes), all(s.positive for s in sizes))


def summed(x: Size, n: float) -> Size:
    """Of a sum over n elements."""
    return Size(x.log + math.log2(max(n, 1)) * (1 if x.positive else 0.5), x.positive)


def mixed(*sizes: Size) -> Size:
    """Of values that are taken from one of several: about as large as the largest."""
    return Size(max(s.log for s in sizes), all(s.positive for s in sizes))


Sizes = Size | tuple[Size, ...]


class Unknown(Exception):
    """A size that a rule asks for is not known."""


class Operands:
    """What a rule sees of an operation: its arguments, the sizes of those that are values, and shapes."""

    def __init__(self, node: Node, found: dict[Node, Sizes]) -> None:
        self.node = node
        self.args = node.args
        self._found = found

    def __getitem__(self, i: int) -> Size:
        """The size of argument `i`, a value or a number."""
        return self.size(self.args[i])

    def size(self, x: Any) -> Size:
        """The size of a value or number; Unknown if it has none."""
        if isinstance(x, (bool, int, float)):
            return of_number(float(x))
        found = self._found.get(x) if isinstance(x, Node) else None
        if not isinstance(found, Size):
            raise Unknown
        return found

    def given(self, i: int, default: Any = None) -> Any:
        """Argument `i` as written, or the default if it is left out."""
        return self.args[i] if len(self.args) > i else default

    def elements(self, x: Any = None) -> int:
        """The number of elements of a value, by default of the result."""
        return int((self.node if x is None else x).meta["val"].numel())

    def shape(self, x: Any = None) -> tuple[int, ...]:
        """The shape of a value, by default of the result."""
        return tuple((self.node if x is None else x).meta["val"].shape)


def packet(node: Node) -> Any:
    """The operation of a node, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


Rule = Callable[[Operands], Sizes]

RULES: dict[Any, Rule] = {}
"""The rule of each operation, all of its overloads."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for operations; an operation has one rule."""
    return registering(RULES, targets)
