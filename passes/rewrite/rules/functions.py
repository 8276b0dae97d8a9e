"""Rules of functions that are made of other operations (`collage_neuron/numerics/functions.py`), and of whole numbers.

No backend knows them: what it computes is their parts. NKI has no operations on the bits of fp32 numbers, and rejects
those that read the sign of a zero, `copysign` and `atan2`.
"""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.numerics import functions
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic
from collage_neuron.passes.rewrite.rules.registry import rule

aten = torch.ops.aten


@rule(aten.round.default)
def nearest(a: Arithmetic, x: Any) -> Any:
    """The nearest whole number, of two the even one: exact."""
    return a.round(functions.nearest(a.read(x)))


@rule(aten.floor.default)
def floor(a: Arithmetic, x: Any) -> Any:
    """The next whole number below: exact."""
    return a.round(functions.floor(a.read(x)))


@rule(aten.ceil.default)
def ceil(a: Arithmetic, x: Any) -> Any:
    """The next whole number above: exact."""
    return a.round(functions.ceil(a.read(x)))


@rule(aten.trunc.default)
def trunc(a: Arithmetic, x: Any) -> Any:
    """x without its fraction: exact."""
    return a.round(functions.truncated(a.read(x)))


@rule(aten.frac.default)
def frac(a: Arithmetic, x: Any) -> Any:
    """x - trunc(x): exact."""
    value = a.read(x)
    return a.round(value - functions.truncated(value))


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(a: Arithmetic, x: Any, y: Any) -> Any:
    """|x| with the sign of y, also that of -0: exact."""
    return a.round(functions.with_sign_of(_computed(a, x), _computed(a, y)))


@rule(aten.expm1.default)
def expm1(a: Arithmetic, x: Any) -> Any:
    """e ** x - 1, as precise near 0 as elsewhere."""
    return a.round(functions.expm1(a.read(x)))


@rule(aten.log1p.default)
def log1p(a: Arithmetic, x: Any) -> Any:
    """log(1 + x), as precise near 0 as elsewhere."""
    return a.round(functions.log1p(a.read(x)))


@rule(aten.tanh.default)
def tanh(a: Arithmetic, x: Any) -> Any:
    """The hyperbolic tangent, as precise near 0 as elsewhere."""
    return a.round(functions.tanh(a.read(x)))


@rule(aten.softplus.default)
def softplus(a: Arithmetic, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """log1p(e ** (beta * x)) / beta, and x itself where beta * x is above the threshold."""
    return a.round(functions.softplus(a.read(x), _number(a, beta), _number(a, threshold)))


@rule(aten.atan2.default)
def atan2(a: Arithmetic, y: Any, x: Any) -> Any:
    """The angle of the point (x, y), from -pi to pi."""
    return a.round(functions.atan2(_computed(a, y), _computed(a, x)))


def _number(a: Arithmetic, x: Any) -> Fp32:
    """A number of the operation, which may be one of the step."""
    return float(x) if isinstance(x, int) else a.read(x)


def _computed(a: Arithmetic, x: Any) -> Fp32:
    """An operand as a plain value that has bits: a literal number becomes one of the step."""
    return a.scalar("fp32", Scalar.constant(float(x))) if isinstance(x, (int, float)) else lift(x).read(a)
