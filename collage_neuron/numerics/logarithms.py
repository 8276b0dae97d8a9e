"""Logarithms to other bases in explicit-rounding form, and logarithms of sums; see `functions`."""

from __future__ import annotations

import math

import torch

from collage_neuron.numerics.eft import Value, fp32, inverse_power_of_two, power_of_two, round_to
from collage_neuron.numerics.functions import LARGEST, log1p

ULPS = {"log2": 4, "log10": 4, "xlogy": 4, "logaddexp": 5, "logaddexp2": 6}
"""As those of `functions`; of sums in units of the larger operand, or of 1, where that is larger than the result.

Rounding the difference of x and y changes the smaller power by as much as rounding x itself would.
"""

ROOT, TINY = fp32(math.sqrt(2)), 2.0**-126
LOG10_HI = 2466 / 8192
"""The upper 12 bits of log10(2): its product with an exponent is exact."""


def log2(x: Value) -> Value:
    """The logarithm to base 2: a whole number, exactly, of a power of two."""
    exponent, rest = _taken_apart(x)
    return _of_positive(x, exponent + rest * fp32(1 / math.log(2)), 1 / math.log(2))


def log10(x: Value) -> Value:
    """The logarithm to base 10."""
    exponent, rest = _taken_apart(x)
    below = exponent * fp32(math.log10(2) - LOG10_HI) + rest * fp32(1 / math.log(10))
    return _of_positive(x, exponent * LOG10_HI + below, 1 / math.log(10))


def _taken_apart(x: Value) -> tuple[Value, Value]:
    """(n, log(m)) of a positive number m * 2**n with m between sqrt(1 / 2) and sqrt(2)."""
    is_tiny = x < TINY
    normal = torch.where(is_tiny, x * 2.0**24, x)
    exponent = round_to(torch.log(power_of_two(normal)) * fp32(1 / math.log(2)), "int16")
    exponent = torch.where(is_tiny, exponent - 24.0, exponent)
    mantissa = normal * inverse_power_of_two(normal) * 0.5  # exact, from 1 to 2
    is_high = mantissa > ROOT
    log = torch.log(torch.where(is_high, mantissa * 0.5, mantissa))
    return torch.where(is_high, exponent + 1.0, exponent), log


def _of_positive(x: Value, result: Value, unit: float) -> Value:
    """The result for positive numbers; of others, and of infinity, the natural logarithm in this unit."""
    is_positive = torch.logical_and(x > 0.0, x <= LARGEST)
    return torch.where(is_positive, result, torch.log(x) * fp32(unit))


def xlogy(x: Value, y: Value) -> Value:
    """x * log(y), and 0 where x is 0 and y is not NaN."""
    product = x * torch.log(y)
    return torch.where(torch.logical_and(x == 0.0, y == y), 0.0, product)


def logaddexp(x: Value, y: Value) -> Value:
    """log(e ** x + e ** y)."""
    return _added(x, y, log1p(torch.exp(-torch.abs(x - y))))


def logaddexp2(x: Value, y: Value) -> Value:
    """The logarithm to base 2 of 2 ** x + 2 ** y."""
    smaller = torch.exp(torch.abs(x - y) * fp32(-math.log(2)))
    return _added(x, y, log1p(smaller) * fp32(1 / math.log(2)))


def _added(x: Value, y: Value, more: Value) -> Value:
    """The larger operand and what the other one adds to it: nothing, if both are the same infinity."""
    is_infinite = torch.logical_and(x == y, torch.abs(x) > LARGEST)
    return torch.where(is_infinite, x, torch.maximum(x, y) + more)
