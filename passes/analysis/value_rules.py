"""The rules of value numbering: how each aten operation acts on sums of products; others give an opaque factor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from collage_neuron.passes.analysis.polynomials import ONE, Sum, plus, scaled
from collage_neuron.passes.analysis.value_algebra import Algebra

aten = torch.ops.aten

Rule = Callable[..., Sum]
RULES: dict[Any, Rule] = {}
"""By aten overload."""


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        RULES.update(dict.fromkeys(targets, f))
        return f

    return register


def _sum(x: Any) -> Sum:
    """An operand as a sum; a number is exact."""
    return x if isinstance(x, dict) else {ONE: float(x)} if x else {}


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(v: Algebra, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return plus(_sum(x), v.times(_sum(y), _sum(alpha)))


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(v: Algebra, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return plus(_sum(x), scaled(v.times(_sum(y), _sum(alpha)), -1.0))


@_rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(v: Algebra, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return _sub(v, y, x, alpha)


@_rule(aten.mul.Tensor, aten.mul.Scalar, aten.logical_and.default, aten.bitwise_and.Tensor)
def _mul(v: Algebra, x: Any, y: Any) -> Sum:
    return v.times(_sum(x), _sum(y))


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(v: Algebra, x: Any, y: Any) -> Sum:
    return v.times(_sum(x), v.power(_sum(y), -1.0))


@_rule(aten.addcmul.default)
def _addcmul(v: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Sum:
    return _add(v, x, v.times(_sum(y), _sum(z)), value)


@_rule(aten.addcdiv.default)
def _addcdiv(v: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Sum:
    return _add(v, x, _div(v, y, z), value)


@_rule(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(v: Algebra, x: Any, y: Any, weight: Any) -> Sum:
    return _add(v, x, _sub(v, y, x), weight)


@_rule(aten.neg.default)
def _neg(v: Algebra, x: Any) -> Sum:
    return scaled(_sum(x), -1.0)


@_rule(aten.abs.default)
def _abs(v: Algebra, x: Any) -> Sum:
    return v.absolute(_sum(x))


@_rule(aten.sign.default, aten.sgn.default)
def _sign(v: Algebra, x: Any) -> Sum:
    return v.sign(_sum(x))


@_rule(aten.pow.Tensor_Scalar)
def _pow(v: Algebra, x: Any, exponent: float) -> Sum:
    return v.power(_sum(x), float(exponent))


@_rule(aten.square.default)
def _square(v: Algebra, x: Any) -> Sum:
    return v.power(_sum(x), 2.0)


@_rule(aten.sqrt.default)
def _sqrt(v: Algebra, x: Any) -> Sum:
    return v.power(_sum(x), 0.5)


@_rule(aten.rsqrt.default)
def _rsqrt(v: Algebra, x: Any) -> Sum:
    return v.power(_sum(x), -0.5)


@_rule(aten.reciprocal.default)
def _reciprocal(v: Algebra, x: Any) -> Sum:
    return v.power(_sum(x), -1.0)


@_rule(aten.exp.default)
def _exp(v: Algebra, x: Any) -> Sum:
    return v.atom("exp", _sum(x))


@_rule(aten.sigmoid.default)
def _sigmoid(v: Algebra, x: Any) -> Sum:
    return v.atom("sigmoid", _sum(x))


@_rule(aten.log.default)
def _log(v: Algebra, x: Any) -> Sum:
    return v.atom("log", _sum(x))


@_rule(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def _maximum(v: Algebra, x: Any, y: Any) -> Sum:
    return v.largest(_sum(x), _sum(y))


@_rule(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def _minimum(v: Algebra, x: Any, y: Any) -> Sum:
    return v.smallest(_sum(x), _sum(y))


@_rule(aten.clamp.default, aten.clamp.Tensor)
def _clamp(v: Algebra, x: Any, min: Any = None, max: Any = None) -> Sum:
    x = x if min is None else _maximum(v, x, min)
    return _sum(x) if max is None else _minimum(v, x, max)


@_rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(v: Algebra, mask: Any, x: Any, y: Any) -> Sum:
    return v.chosen(_sum(mask), _sum(x), _sum(y))


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(v: Algebra, x: Any, mask: Any, value: Any) -> Sum:
    return v.chosen(_sum(mask), _sum(value), _sum(x))


@_rule(aten.index_put.default)
def _index_put(v: Algebra, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Sum:
    masks = [_sum(i) for i in indices]
    return v.chosen(masks[0], plus(_sum(x), _sum(values)) if accumulate else _sum(values), _sum(x))


@_rule(aten.nan_to_num.default)
def _nan_to_num(v: Algebra, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Sum:
    value, largest = _sum(x), torch.finfo(torch.float32).max
    given = {"isposinf": (posinf, largest), "isneginf": (neginf, -largest), "isnan": (nan, 0.0)}
    for name, (number, default) in given.items():
        value = v.chosen(v.atom("mask", value, name=name), _sum(default if number is None else number), value)
    return value


@_rule(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._to_copy.default)
def _same(v: Algebra, x: Any, **_: Any) -> Sum:
    return _sum(x)


@_rule(aten.copy.default)
def _copy(v: Algebra, x: Any, source: Any, non_blocking: bool = False) -> Sum:
    return _sum(source)


@_rule(aten.zero.default)
def _zero(v: Algebra, x: Any) -> Sum:
    return {}


@_rule(aten.fill.Scalar)
def _fill(v: Algebra, x: Any, value: Any) -> Sum:
    return _sum(value)


@_rule(aten.zeros_like.default, aten.new_zeros.default)
def _zeros(v: Algebra, *_: Any, **__: Any) -> Sum:
    return v.atom("fill", name="0")


@_rule(aten.ones_like.default, aten.new_ones.default)
def _ones(v: Algebra, *_: Any, **__: Any) -> Sum:
    return v.atom("fill", name="1")


@_rule(
    aten.full_like.default, aten.full.default, aten.new_full.default,
    aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default,
)  # fmt: skip
def _full(v: Algebra, *_: Any, **__: Any) -> Sum:
    return v.atom("number", name=str(len(v.atoms))) if v.exact else v.atom("fill", name="some number")


@_rule(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim)
def _total(v: Algebra, x: Any, *_: Any, **__: Any) -> Sum:
    return v.atom("total", _sum(x))


@_rule(aten.linalg_vector_norm.default)
def _norm(v: Algebra, x: Any, *_: Any, **__: Any) -> Sum:
    return v.atom("norm", _sum(x))


def _mask_rule(name: str) -> Rule:
    def mask(v: Algebra, *operands: Any) -> Sum:
        return v.atom("mask", *map(_sum, operands), name=name)

    return mask


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _packet: Any = getattr(aten, _name)
    _rule(_packet.Tensor, _packet.Scalar)(_mask_rule(_name))
for _target in (
    aten.logical_or.default, aten.bitwise_or.Tensor, aten.logical_not.default, aten.bitwise_not.default,
    aten.isnan.default, aten.isinf.default,
):  # fmt: skip
    _rule(_target)(_mask_rule(str(_target)))
