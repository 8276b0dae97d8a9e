"""Functions in explicit-rounding form: each is made of operations that every backend has, so none needs its own.

They work on fp32 tensors and, unchanged, on `torch.fx.Proxy`. The whole numbers are exact; the others are within
`ULPS` units of the last place of the exact result where `exp` and `log` are within one, and agree with torch's own on
NaN, on infinity, and on the sign of zero. A polynomial takes over where a difference with 1 would cancel: the result of
a small number has as many right digits as that of a large one. `tests/numerics/test_functions.py` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from collage_neuron.numerics.eft import Value, bits_of, fp32, from_bits, round_to

ULPS = {"expm1": 4, "log1p": 4, "tanh": 8, "softplus": 5, "atan2": 5}
"""How far a function may be from the exact result, in units of its last place, where that is a normal number.

`softplus` of the fp32 number beta * x, whose own rounding changes a small result by up to 2**-24 * |beta * x|.
"""

SIGN, MAGNITUDE = -0x80000000, 0x7FFFFFFF
WHOLE = 2.0**23
"""From here on every fp32 number is whole."""


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] * x + c[2] * x**2 + ..., from the last term on."""
    *rest, total = map(fp32, coefficients)
    for c in reversed(rest):
        total = x * total + c
    return total


def nearest(x: Value) -> Value:
    """The whole number nearest to x, of two the even one; -0.3 becomes -0.

    By conversions to integers of 16 bits, in two steps: XLA makes x of (x + 2**23) - 2**23.
    """
    size = torch.abs(x)
    inside = torch.where(size < WHOLE, size, 0.0)
    upper = round_to(inside * 2.0**-12, "int16") * 2.0**12  # even: what is left decides which number is
    near = upper + round_to(inside - upper, "int16")
    signed = torch.where(x < 0.0, -near, near)
    return torch.where(torch.logical_and(size < WHOLE, x != 0.0), signed, x)  # -0 is not less than 0


def floor(x: Value) -> Value:
    """The largest whole number that is not above x."""
    near = nearest(x)
    return torch.where(near > x, near - 1.0, near)


def with_sign_of(x: Value, y: Value) -> Value:
    """|x| with the sign of y, which may be that of a zero or a NaN."""
    return from_bits((bits_of(x) & MAGNITUDE) | (bits_of(y) & SIGN))


def expm1(x: Value) -> Value:
    """e ** x - 1."""
    small = x * polynomial(x, [1 / math.factorial(k) for k in range(1, 10)])
    return torch.where(torch.abs(x) < 0.5, small, torch.exp(x) - 1.0)


def log1p(x: Value) -> Value:
    """log(1 + x); near 0 by the series of twice the inverse hyperbolic tangent of half of x / (1 + x / 2)."""
    ratio = x / (x * 0.5 + 1.0)
    small = ratio * polynomial(ratio * ratio, [1 / ((2 * k + 1) * 4**k) for k in range(8)])
    return torch.where(torch.abs(x) < 0.5, small, torch.log(x + 1.0))


def tanh(x: Value) -> Value:
    """The hyperbolic tangent, which is 1 from 10 on."""
    limited = torch.where(x > 10.0, 10.0, torch.where(x < -10.0, -10.0, x))
    grown = expm1(limited * 2.0)
    return grown / (grown + 2.0)


def softplus(x: Value, beta: Value, threshold: Value) -> Value:
    """log1p(e ** (beta * x)) / beta, and x itself where beta * x is above the threshold."""
    scaled = x * beta
    return torch.where(scaled > threshold, x, log1p(torch.exp(scaled)) / beta)


def atan2(y: Value, x: Value) -> Value:
    """The angle of the point (x, y), from -pi to pi: of the two, the smaller magnitude is divided by the larger."""
    across, along = torch.abs(x), torch.abs(y)
    angle = quadrant(along, across)
    angle = torch.where((bits_of(x) & SIGN) == 0, angle, fp32(math.pi) - angle)
    return torch.where((bits_of(y) & SIGN) == 0, angle, -angle)


def quadrant(along: Value, across: Value) -> Value:
    """The angle, from 0 to pi / 2, of a point whose coordinates are not negative."""
    small, large = torch.minimum(across, along), torch.maximum(across, along)
    angle = angle_of(torch.where(small == large, torch.sign(small), small / large))  # of equals, infinity or 0
    return torch.where(along > across, fp32(math.pi / 2) - angle, angle)


def angle_of(x: Value) -> Value:
    """The angle whose tangent is x, from 0 to 1; from tan(pi / 8) on that of (x - 1) / (x + 1), and an eighth more."""
    is_large = x > fp32(math.tan(math.pi / 8))
    reduced = torch.where(is_large, (x - 1.0) / (x + 1.0), x)
    # Moshier, Cephes, atanf: within 2**-26 up to tan(pi / 8).
    series = polynomial(reduced * reduced, [-0.333329491539, 0.199777106478, -0.138776856032, 0.0805374449538])
    angle = reduced * reduced * reduced * series + reduced
    return torch.where(is_large, angle + fp32(math.pi / 4), angle)
