"""The error function and its complement in explicit-rounding form; see `functions`."""

from __future__ import annotations

import math

import torch

from collage_neuron.numerics.eft import Value, bf16
from collage_neuron.numerics.functions import polynomial, signed

ULPS = {"erf": 4, "erfc": 8}
"""As those of `functions`."""

SERIES = [2 / math.sqrt(math.pi) * (-1) ** k / (math.factorial(k) * (2 * k + 1)) for k in range(11)]
"""Of erf(x) / x in powers of x * x: up to 1 the next term is less than 2**-28 of the sum."""
SCALED = [
    1.2769783854939538, -0.09276376354350221, -0.16603087193299912, 0.1640487110354194, -0.05421065747595525,
    -0.00800531232812099, 0.008656753074287532, 0.0011450599379673552, -0.0012625752819185965, -0.0002237666970169144,
]  # fmt: skip
"""Of e ** (x * x) * erfc(x) * (1 + 2 * x) in powers of (x - 2) / (x + 2), from 0.5 to 10.5: within 2**-27 of it."""


def erf(x: Value) -> Value:
    """The error function."""
    size = torch.abs(x)
    return torch.where(size < 1.0, x * polynomial(x * x, SERIES), signed(x, 1.0 - _above(size)))


def erfc(x: Value) -> Value:
    """1 - erf(x), as precise where that is small as elsewhere."""
    size = torch.abs(x)
    outer = _above(size)
    inner = 1.0 - x * polynomial(x * x, SERIES)
    return torch.where(size < 0.5, inner, torch.where(x < 0.0, 2.0 - outer, outer))


def _above(x: Value) -> Value:
    """erfc(x) from 0.5 on. Of x * x, the square of the upper bits is exact, so that its exponential is precise."""
    x = torch.where(x > 10.5, 10.5, x)  # 0 from there on
    upper = bf16(x)
    scaled = polynomial((x - 2.0) / (x + 2.0), SCALED) / (x * 2.0 + 1.0)
    # Not the product of both exponentials first: XLA makes of it the one of a sum, which is rounded.
    return torch.exp(-(upper * upper)) * scaled * torch.exp((upper - x) * (upper + x))
