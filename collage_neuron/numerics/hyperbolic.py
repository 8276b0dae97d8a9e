"""Hyperbolic functions and their inverses in explicit-rounding form, as precise near 0 as elsewhere (`functions`)."""

from __future__ import annotations

import math

import torch

from collage_neuron.numerics.eft import Value, fp32, sqrt
from collage_neuron.numerics.functions import expm1, log1p, polynomial, signed

ULPS = {"sinh": 6, "cosh": 4, "asinh": 7, "acosh": 7, "atanh": 5}
"""As those of `functions`."""

GROWN = 20.0
"""From here on e ** -x is less than half of the last place of e ** x."""
FAR = 2.0**13
"""From here on 1 is less than half of the last place of x * x."""


def sinh(x: Value) -> Value:
    """(e ** x - e ** -x) / 2."""
    size = torch.abs(x)
    grown = expm1(size)
    near = (grown + grown / (grown + 1.0)) * 0.5
    return signed(x, torch.where(size > GROWN, _half_of_exp(size), near))


def cosh(x: Value) -> Value:
    """(e ** x + e ** -x) / 2."""
    size = torch.abs(x)
    grown = torch.exp(size)
    return torch.where(size > GROWN, _half_of_exp(size), (grown + 1.0 / grown) * 0.5)


def _half_of_exp(x: Value) -> Value:
    """(e ** x) / 2, which may be a number where e ** x is not."""
    root = torch.exp(x * 0.5)
    return root * 0.5 * root


def asinh(x: Value) -> Value:
    """The number whose hyperbolic sine is x: the sign of x, and log(|x| + sqrt(x * x + 1))."""
    size = torch.abs(x)
    square = size * size
    near = log1p(size + square / (sqrt(square + 1.0) + 1.0))
    return signed(x, torch.where(size > FAR, torch.log(size) + fp32(math.log(2)), near))


def acosh(x: Value) -> Value:
    """The number, not negative, whose hyperbolic cosine is x: log(x + sqrt(x * x - 1)); NaN below 1."""
    above = x - 1.0
    square = torch.where(x < 1.0, -1.0, above * (above + 2.0))  # of -1, NaN is the root
    near = torch.where(x == 1.0, 0.0, log1p(above + sqrt(square)))  # NKI's root of 0 is 2**-58
    return torch.where(x > FAR, torch.log(x) + fp32(math.log(2)), near)


def atanh(x: Value) -> Value:
    """The number whose hyperbolic tangent is x: log((1 + x) / (1 - x)) / 2; infinite at 1, NaN beyond."""
    size = torch.abs(x)
    small = x * polynomial(x * x, [1 / (2 * k + 1) for k in range(7)])
    return torch.where(size < 0.25, small, signed(x, torch.log((size + 1.0) / (1.0 - size)) * 0.5))
