"""Rules of trigonometric and hyperbolic functions (`collage_neuron/numerics/angles.py` and `hyperbolic.py`).

`sin` and `cos` are operations of their own, for which NKI has no instruction that takes every angle: it rejects them,
and `tan`. The others are made of operations that every backend has.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from collage_neuron.numerics import angles, hyperbolic
from collage_neuron.numerics.eft import fp32
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, computed
from collage_neuron.passes.rewrite.rules.registry import rule

aten = torch.ops.aten


@rule(aten.sin.default)
def sin(a: Arithmetic, x: Any) -> Any:
    """The sine; backends differ by their own error."""
    return a.round(torch.sin(a.read(x)))


@rule(aten.cos.default)
def cos(a: Arithmetic, x: Any) -> Any:
    """The cosine; backends differ by their own error."""
    return a.round(torch.cos(a.read(x)))


@rule(aten.tan.default)
def tan(a: Arithmetic, x: Any) -> Any:
    """sin(x) / cos(x)."""
    return a.round(angles.tan(a.read(x)))


@rule(aten.asin.default)
def asin(a: Arithmetic, x: Any) -> Any:
    """The angle whose sine is x, as precise near 1 as elsewhere."""
    return a.round(angles.asin(a.read(x)))


@rule(aten.acos.default)
def acos(a: Arithmetic, x: Any) -> Any:
    """The angle whose cosine is x, as precise near 1 as elsewhere."""
    return a.round(angles.acos(a.read(x)))


@rule(aten.atan.default)
def atan(a: Arithmetic, x: Any) -> Any:
    """The angle whose tangent is x."""
    return a.round(angles.atan(a.read(x)))


@rule(aten.hypot.default)
def hypot(a: Arithmetic, x: Any, y: Any) -> Any:
    """sqrt(x * x + y * y), which overflows only where the result does."""
    return a.round(angles.hypot(computed(a, x), computed(a, y)))


@rule(aten.deg2rad.default)
def deg2rad(a: Arithmetic, x: Any) -> Any:
    """x * (pi / 180)."""
    return a.round(a.read(x) * fp32(math.pi / 180))


@rule(aten.rad2deg.default)
def rad2deg(a: Arithmetic, x: Any) -> Any:
    """x * (180 / pi)."""
    return a.round(a.read(x) * fp32(180 / math.pi))


@rule(aten.sinh.default)
def sinh(a: Arithmetic, x: Any) -> Any:
    """(e ** x - e ** -x) / 2, as precise near 0 as elsewhere."""
    return a.round(hyperbolic.sinh(a.read(x)))


@rule(aten.cosh.default)
def cosh(a: Arithmetic, x: Any) -> Any:
    """(e ** x + e ** -x) / 2."""
    return a.round(hyperbolic.cosh(a.read(x)))


@rule(aten.asinh.default)
def asinh(a: Arithmetic, x: Any) -> Any:
    """The inverse of sinh, as precise near 0 as elsewhere."""
    return a.round(hyperbolic.asinh(a.read(x)))


@rule(aten.acosh.default)
def acosh(a: Arithmetic, x: Any) -> Any:
    """The inverse of cosh, as precise near 1 as elsewhere."""
    return a.round(hyperbolic.acosh(a.read(x)))


@rule(aten.atanh.default)
def atanh(a: Arithmetic, x: Any) -> Any:
    """The inverse of tanh, as precise near 0 as elsewhere."""
    return a.round(hyperbolic.atanh(a.read(x)))
