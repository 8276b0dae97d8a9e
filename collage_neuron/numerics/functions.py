"""Functions in explicit-rounding form: each is made of operations that every backend has, so none needs its own.

They work on fp32 tensors and, unchanged, on `torch.fx.Proxy`. They are within `ULPS` units of the last place of the
exact result where `exp` and `log` are within one, and agree with torch's own on NaN, on infinity, and on the sign of
zero. A polynomial takes over where a difference with 1 would cancel: the result of a small number has as many right
digits as that of a large one. `tests/numerics/test_functions.py` has the evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from collage_neuron.numerics.eft import Value, bits_of, fp32

ULPS = {"log1p": 4, "softplus": 5, "atan2": 5}
"""How far a function may be from the exact result, in units of its last place, where that is a normal number.

`softplus` of the fp32 number beta * x, whose own rounding changes a small result by up to 2**-24 * |beta * x|.
"""

SIGN = -0x80000000


def polynomial(x: Value, coefficients: Sequence[float]) -> Value:
    """c[0] + c[1] * x + c[2] * x**2 + ..., from the last term on."""
    *rest, total = map(fp32, coefficients)
    for c in reversed(rest):
        total = x * total + c
    return total


def log1p(x: Value) -> Value:
    """log(1 + x); near 0 by the series of twice the inverse hyperbolic tangent of half of x / (1 + x / 2)."""
    ratio = x / (x * 0.5 + 1.0)
    small = ratio * polynomial(ratio * ratio, [1 / ((2 * k + 1) * 4**k) for k in range(8)])
    return torch.where(torch.abs(x) < 0.5, small, torch.log(x + 1.0))


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
