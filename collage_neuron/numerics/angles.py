"""Angles and sides of triangles in explicit-rounding form: tangents, inverse sines, the long side of a right triangle.

As in `functions`: made of operations of every backend but for `sin` and `cos`, and within `ULPS` of the exact result.
"""

from __future__ import annotations

import math

import torch

from collage_neuron.numerics.eft import Value, fp32, sqrt
from collage_neuron.numerics.functions import LARGEST, angle_of, quadrant, signed

ULPS = {"tan": 4, "atan": 4, "asin": 5, "acos": 5, "hypot": 3}
"""As those of `functions`."""


def tan(x: Value) -> Value:
    """The tangent."""
    return torch.sin(x) / torch.cos(x)


def atan(x: Value) -> Value:
    """The angle whose tangent is x, from -pi / 2 to pi / 2."""
    size = torch.abs(x)
    is_large = size > 1.0
    angle = angle_of(torch.where(is_large, 1.0 / size, size))
    return signed(x, torch.where(is_large, fp32(math.pi / 2) - angle, angle))


def asin(x: Value) -> Value:
    """The angle whose sine is x, from -pi / 2 to pi / 2; NaN beyond 1."""
    return signed(x, quadrant(torch.abs(x), _other(x)))


def acos(x: Value) -> Value:
    """The angle whose cosine is x, from 0 to pi; NaN beyond 1."""
    angle = quadrant(_other(x), torch.abs(x))
    return torch.where(x < 0.0, fp32(math.pi) - angle, angle)


def _other(x: Value) -> Value:
    """The cosine of an angle whose sine is x: 1 - x * x would cancel near 1."""
    return sqrt((1.0 - x) * (x + 1.0))


def hypot(x: Value, y: Value) -> Value:
    """sqrt(x * x + y * y), which overflows only where the result does; infinite if one operand is."""
    across, along = torch.abs(x), torch.abs(y)
    small, large = torch.minimum(across, along), torch.maximum(across, along)
    ratio = torch.where(small == large, torch.sign(small), small / large)  # of equals, infinity or 0
    is_infinite = torch.logical_or(across > LARGEST, along > LARGEST)
    return torch.where(is_infinite, math.inf, large * sqrt(ratio * ratio + 1.0))
