"""Rules that compute each element from the elements of the operands: sums, products, roots, powers, functions."""

from __future__ import annotations

from collections.abc import Callable
from math import nextafter
from typing import Any

import torch

from collage_neuron.numerics import functions
from collage_neuron.numerics.eft import sqrt as _root  # `sqrt` below is the rule
from collage_neuron.passes.ir.values import Fp32, lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, Mask, computed, times
from collage_neuron.passes.rewrite.rules.table import RULES, operation, rule

aten = torch.ops.aten


@operation
def add_to(a: Arithmetic, x: Any, increment: Fp32) -> Any:
    """x + increment, a plain value that is not rounded yet."""
    return a.round(a.read(x) + increment)


def _are_masks(x: Any, y: Any) -> bool:
    """Returns True if both operands are boolean: torch's sums and products of them are, too."""
    return lift(x).mask is not None and lift(y).mask is not None


@rule(aten.add.Tensor, aten.add.Scalar)
def add(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y. Of two masks either, which is a mask."""
    if isinstance(alpha, int) and alpha == 1 and _are_masks(x, y):
        return Mask(torch.logical_or(a.truth(x), a.truth(y)))
    return add_to(a, x, times(a, y, alpha))


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x - alpha * y."""
    return a.round(a.read(x) - times(a, y, alpha))


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """y - alpha * x."""
    return sub(a, y, x, alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(a: Arithmetic, x: Any, y: Any) -> Any:
    """x * y; a state times a scalar stays a state. Of two masks both, which is a mask (`torch.isfinite`)."""
    if _are_masks(x, y):
        return Mask(torch.logical_and(a.truth(x), a.truth(y)))
    return a.round(times(a, x, y))


@rule(aten.div.Tensor, aten.div.Scalar)
def div(a: Arithmetic, x: Any, y: Any) -> Any:
    """x / y; a state divided by a scalar stays a state."""
    return a.round(a.read(x) / a.read(y))


@rule(aten.addcmul.default)
def addcmul(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """x + (value * y) * z, in this order as in ATen: y * z alone may overflow."""
    return add_to(a, x, times(a, times(a, y, value), z))


@rule(aten.addcdiv.default)
def addcdiv(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """x + (value * y) / z, in this order as in ATen."""
    return add_to(a, x, times(a, y, value) / a.read(z))


_BELOW_QUARTER = nextafter(0.25, 0.0)
"""Divided by a number it is less than a half if that number is a half or more."""


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Arithmetic, x: Any, y: Any, weight: Any) -> Any:
    """x + weight * (y - x), or from a weight of a half on y + (weight - 1) * (y - x), which is y at 1.

    So is that of whole vectors in ATen, also in the signs of zeros; at the end of a tensor ATen has -(1 - weight).
    For a state in bf16 arithmetic (1 - weight) * x + weight * y, with 1 - weight from the host. Where the weight is a
    tensor, each element has the form of its own.
    """
    host = lift(weight).host
    if host is not None and a.is_far(_BELOW_QUARTER / host):
        return a.round(a.read(y) + a.read(host - 1) * (a.read(y) - a.read(x)))
    rate, gap = a.read(weight), a.read(y) - a.read(x)
    near = add_to(a, x, rate * gap)
    if host is not None or isinstance(rate, (int, float)):
        return near
    far = a.round(a.read(y) + (rate - 1.0) * gap)
    where = RULES[aten.where.self]  # of `masks`, whose rules follow these in the table
    return where(a, Mask(torch.abs(rate) < 0.5), near, far)


@rule(aten.neg.default)
def neg(a: Arithmetic, x: Any) -> Any:
    """-x: exact."""
    return -a.read(x)


@rule(aten.abs.default)
def absolute(a: Arithmetic, x: Any) -> Any:
    """|x|: exact."""
    return torch.abs(a.read(x))


@rule(aten.sign.default, aten.sgn.default)
def sign(a: Arithmetic, x: Any) -> Any:
    """-1, 0 or 1."""
    return torch.sign(a.read(x))


@rule(aten.sqrt.default)
def sqrt(a: Arithmetic, x: Any) -> Any:
    """The square root."""
    return a.round(_root(a.read(x)))


@rule(aten.reciprocal.default)
def reciprocal(a: Arithmetic, x: Any) -> Any:
    """1 / x."""
    return a.round(1.0 / a.read(x))


@rule(aten.rsqrt.default)
def rsqrt(a: Arithmetic, x: Any) -> Any:
    """1 / sqrt(x), in fp32 arithmetic two roundings."""
    return a.round(1.0 / _root(a.read(x)))


@rule(aten.pow.Tensor_Scalar)
def power(a: Arithmetic, x: Any, exponent: float) -> Any:
    """x ** exponent, by exact or correctly rounded operations where the exponent allows."""
    forms: dict[float, Callable[..., Any]] = {
        3: lambda v: v * v * v,
        2: lambda v: v * v,
        1: lambda v: v,
        0.5: _root,
        -0.5: lambda v: 1.0 / _root(v),
        -1: lambda v: 1.0 / v,
    }
    value = a.read(x)  # squares, cubes and roots have the same bits on every backend, which `pow` has not
    return a.round(forms[exponent](value) if exponent in forms else torch.pow(value, float(exponent)))


@rule(aten.sigmoid.default)
def sigmoid(a: Arithmetic, x: Any) -> Any:
    """1 / (1 + e ** -x)."""
    return a.round(1.0 / (torch.exp(-a.read(x)) + 1.0))


@rule(aten.exp.default)
def exp(a: Arithmetic, x: Any) -> Any:
    """e ** x; backends differ by their own error."""
    return a.round(torch.exp(a.read(x)))


@rule(aten.log.default)
def log(a: Arithmetic, x: Any) -> Any:
    """The natural logarithm; backends differ by their own error."""
    return a.round(torch.log(a.read(x)))


@rule(aten.square.default)
def square(a: Arithmetic, x: Any) -> Any:
    """x * x."""
    # Read first: an accumulator would take over a product of which it is a factor.
    return mul(a, a.read(x), a.read(x))


@rule(aten.softplus.default)
def softplus(a: Arithmetic, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """log1p(e ** (beta * x)) / beta, and x itself where beta * x is above the threshold."""
    return a.round(functions.softplus(a.read(x), _number(a, beta), _number(a, threshold)))


def _number(a: Arithmetic, x: Any) -> Fp32:
    """A number of the operation, which may be one of the step."""
    return float(x) if isinstance(x, int) else a.read(x)


@rule(aten.atan2.default)
def atan2(a: Arithmetic, y: Any, x: Any) -> Any:
    """The angle of the point (x, y), from -pi to pi. NKI rejects it: no instruction reads the sign of a zero."""
    return a.round(functions.atan2(computed(a, y), computed(a, x)))
