"""The size of a value: the binary logarithm of its expected root mean square, and how sizes combine.

Elements are taken to be independent and centred, which is what makes a sum of n of them sqrt(n) times as large. Values
that cannot be negative add up to n times as much, so a size remembers if it is one of those.
"""

from __future__ import annotations

import math
from typing import NamedTuple


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
