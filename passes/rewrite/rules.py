"""What each aten operation becomes in explicit-rounding form: one rule per operation, in a table.

A rule takes the arithmetic and the operation's operands: plain values, host `Scalar`s, or states on their
accumulation path. It computes in fp32 and hands the result to `a.round`, which is one rounding in bf16
arithmetic and none in fp32; what is added to a state goes through `State.plus`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import Value
from collage_neuron.numerics.eft import sqrt as _root  # `sqrt` below is the rule
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, Pair, choose, is_mask, is_state, larger, smaller

aten = torch.ops.aten
Rule = Callable[..., Any]

CARRIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten.copy.default, aten._to_copy.default}
"""Operations whose result is their operand: a copy of the parameter is as exact as the parameter."""

RULES: dict[Any, Rule] = {}
"""The rule of each aten overload."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for `targets`; an operation has one rule."""

    def register(f: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} already has the rule {RULES[target].__name__}")
            RULES[target] = f
        return f

    return register


def rule_for(target: Any, node: str) -> Rule:
    """The rule of `target`, used by the node called `node`; UnsupportedUpdate if it has none."""
    try:
        return RULES[target]
    except KeyError:
        raise UnsupportedUpdate(
            f"the update uses {target} (node {node}), which has no rule; write the update with elementwise operations "
            "that have one (the keys of collage_neuron.passes.rules.RULES), or register one with `rule` of that module"
        ) from None


def add_to(a: Arithmetic, x: Any, increment: Value) -> Any:
    """x + increment, with care if x is a state."""
    return x.plus(increment) if is_state(x) else a.round(a.read(x) + increment)


def times(a: Arithmetic, x: Any, y: Any) -> Value:
    """x * y before rounding; a factor of 1 multiplies nothing."""
    x, y = a.read(x), a.read(y)
    return x if isinstance(y, int) and y == 1 else -x if isinstance(y, int) and y == -1 else x * y


@rule(aten.add.Tensor, aten.add.Scalar)
def add(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y."""
    if is_state(y) and not is_state(x) and alpha == 1:
        x, y = y, x
    return add_to(a, x, times(a, y, alpha))


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x - alpha * y."""
    return add_to(a, x, -times(a, y, alpha)) if is_state(x) else a.round(a.read(x) - times(a, y, alpha))


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """y - alpha * x."""
    return sub(a, y, x, alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(a: Arithmetic, x: Any, y: Any) -> Any:
    """x * y; a state times a scalar stays a state."""
    if is_state(y) and not is_state(x):
        x, y = y, x
    if is_state(x):
        return x.times(y if isinstance(y, Scalar) else a.read(y))
    return a.round(times(a, x, y))


@rule(aten.div.Tensor, aten.div.Scalar)
def div(a: Arithmetic, x: Any, y: Any) -> Any:
    """x / y; a state divided by a scalar stays a state."""
    if is_state(x) and isinstance(y, Scalar):
        return x.over(y)
    return a.round(a.read(x) / a.read(y))


@rule(aten.addcmul.default)
def addcmul(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """x + (value * y) * z, in this order as in ATen: y * z alone may overflow."""
    return add_to(a, x, times(a, times(a, y, value), z))


@rule(aten.addcdiv.default)
def addcdiv(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """x + (value * y) / z, in this order as in ATen."""
    return add_to(a, x, times(a, y, value) / a.read(z))


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Arithmetic, x: Any, y: Any, weight: Any) -> Any:
    """x + weight * (y - x); for a state (1 - weight) * x + weight * y, with 1 - weight from the host."""
    if a.is_pair(x) and isinstance(weight, Scalar):
        if isinstance(x, Pair) and not a.is_pair(y):
            return x.times(1 - weight).plus(times(a, y, weight))
        return x.plus(times(a, a.gap(x, y), weight))
    return add_to(a, x, a.read(weight) * (a.read(y) - a.read(x)))


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
    value = a.read(x)
    return a.round(forms[exponent](value) if exponent in forms else torch.pow(value, float(exponent)))


@rule(aten.maximum.default)
def maximum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The larger: exact. Of expansions the larger pair."""
    if a.is_pair(x) or a.is_pair(y):
        return a.pick(larger, x, y)
    return torch.maximum(a.choice(x), a.choice(y))


@rule(aten.minimum.default)
def minimum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The smaller: exact. Of expansions the smaller pair."""
    if a.is_pair(x) or a.is_pair(y):
        return a.pick(smaller, x, y)
    return torch.minimum(a.choice(x), a.choice(y))


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(a: Arithmetic, x: Any, min: Any = None, max: Any = None) -> Any:
    """minimum(maximum(x, min), max)."""
    x = x if min is None else maximum(a, x, min)
    return x if max is None else minimum(a, x, max)


@rule(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(a: Arithmetic, x: Any, min: Any) -> Any:
    """maximum(x, min)."""
    return maximum(a, x, min)


@rule(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(a: Arithmetic, x: Any, max: Any) -> Any:
    """minimum(x, max)."""
    return minimum(a, x, max)


COMPARISONS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}


def _comparison(compare: Callable[[Value, Value], Value]) -> Rule:
    def compares(a: Arithmetic, x: Any, y: Any) -> Any:
        return compare(a.read(x), a.read(y))

    compares.__doc__ = str(compare.__doc__).replace("Same as", "The mask")  # "The mask a < b."
    return compares


for _name, _compare in COMPARISONS.items():
    _packet: Any = getattr(aten, _name)
    rule(_packet.Tensor, _packet.Scalar)(_comparison(_compare))


@rule(aten.logical_and.default, aten.bitwise_and.Tensor)
def logical_and(a: Arithmetic, x: Any, y: Any) -> Any:
    """Both masks."""
    return torch.logical_and(x, y)


@rule(aten.logical_or.default, aten.bitwise_or.Tensor)
def logical_or(a: Arithmetic, x: Any, y: Any) -> Any:
    """Either mask."""
    return torch.logical_or(x, y)


@rule(aten.logical_not.default, aten.bitwise_not.default)
def logical_not(a: Arithmetic, x: Any) -> Any:
    """Not the mask."""
    return torch.logical_not(x)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(a: Arithmetic, mask: Any, x: Any, y: Any) -> Any:
    """x where the mask is true, else y: exact. Of expansions whole pairs."""
    if a.is_pair(x) or a.is_pair(y):
        return a.pick(lambda u, v: choose(mask, u, v), x, y)
    return torch.where(mask, a.choice(x), a.choice(y))


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(a: Arithmetic, x: Any, mask: Any, value: Any) -> Any:
    """The value where the mask is true, else x."""
    return where(a, mask, value, x)


@rule(aten.index_put.default)
def index_put(a: Arithmetic, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """x[mask] = value, the one form that is elementwise."""
    if len(indices) != 1 or not is_mask(indices[0]) or accumulate or not isinstance(values, Scalar):
        raise UnsupportedUpdate("the update writes to some elements by index; only x[mask] = number is elementwise")
    return where(a, indices[0], values, x)


@rule(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def same(a: Arithmetic, x: Any, **_: Any) -> Any:
    """x itself."""
    return x


@rule(aten._to_copy.default)
def to_dtype(a: Arithmetic, x: Any, *, dtype: Any = None, **_: Any) -> Any:
    """x as another dtype: a mask becomes 0 and 1; bf16 or fp32 is the arithmetic's business, not the optimizer's."""
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
        raise UnsupportedUpdate(
            f"the update converts a tensor to {dtype}; only floating-point updates can be rewritten"
        )
    return a.read(x) if is_mask(x) else x


@rule(aten.copy.default)
def copy(a: Arithmetic, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The source: what was there before is overwritten."""
    return source


@rule(aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default, aten.zero.default)
def zeros(a: Arithmetic, *_: Any, **__: Any) -> Any:
    """The number 0."""
    return Scalar.constant(0.0)


@rule(aten.ones_like.default, aten.ones.default, aten.new_ones.default)
def ones(a: Arithmetic, *_: Any, **__: Any) -> Any:
    """The number 1."""
    return Scalar.constant(1.0)


@rule(aten.full_like.default, aten.full.default)
def full(a: Arithmetic, like: Any, value: Any, **_: Any) -> Any:
    """A number."""
    return value if isinstance(value, Scalar) else Scalar.constant(float(value))


@rule(aten.new_full.default)
def new_full(a: Arithmetic, like: Any, size: Any, value: Any, **_: Any) -> Any:
    """A number."""
    return full(a, like, value)


@rule(aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
def empty(a: Arithmetic, *_: Any, **__: Any) -> Any:
    """A number, which will be overwritten: the update would read memory that nobody wrote."""
    return Scalar.constant(0.0)


@rule(aten.sigmoid.default)
def sigmoid(a: Arithmetic, x: Any) -> Any:
    """1 / (1 + e ** -x)."""
    return a.round(1.0 / (torch.exp(-a.read(x)) + 1.0))


@rule(aten.fill.Scalar)
def fill(a: Arithmetic, x: Any, value: Any) -> Any:
    """A number: what was there before is overwritten."""
    return value


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
    return mul(a, a.read(x), a.read(x))


@rule(operator.getitem)
def item(a: Arithmetic, x: Any, index: int) -> Any:
    """One result of several."""
    return x[index]
