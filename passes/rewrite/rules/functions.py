"""Rules of functions that are made of other operations (`collage_neuron/numerics/functions.py`), and of whole numbers.

No backend knows them: what it computes is their parts. NKI has no operations on the bits of fp32 numbers, and rejects
those that read the sign of a zero: `copysign`, `atan2` and `signbit`.
"""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.numerics import functions
from collage_neuron.numerics.eft import bits_of
from collage_neuron.passes.ir.values import Fp32
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, Mask, computed
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


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(a: Arithmetic, x: Any, y: Any) -> Any:
    """|x| with the sign of y, also that of -0: exact."""
    return a.round(functions.with_sign_of(computed(a, x), computed(a, y)))


@rule(aten.signbit.default)
def signbit(a: Arithmetic, x: Any) -> Any:
    """The mask of numbers, zeros and NaN with a minus sign."""
    return Mask((bits_of(computed(a, x)) & functions.SIGN) != 0)


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
    return a.round(functions.atan2(computed(a, y), computed(a, x)))


def _number(a: Arithmetic, x: Any) -> Fp32:
    """A number of the operation, which may be one of the step."""
    return float(x) if isinstance(x, int) else a.read(x)
