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

from collage_neuron.eft import Expansion, Value
from collage_neuron.passes.arithmetic import Arithmetic, Pair, PairSum, is_state, larger
from collage_neuron.passes.record import UnsupportedUpdate
from collage_neuron.passes.scalars import Scalar

aten = torch.ops.aten
Rule = Callable[..., Any]

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
            f"the update uses {target} (node {node}), which has no rule; write the update with other elementwise "
            "operations, or add a rule to passes/rules.py"
        ) from None


def add_to(a: Arithmetic, x: Any, increment: Value) -> Any:
    """X + increment, with care if x is a state."""
    return x.plus(increment) if is_state(x) else a.round(a.read(x) + increment)


def times(a: Arithmetic, x: Any, y: Any) -> Value:
    """X * y before rounding; a factor of 1 multiplies nothing."""
    x, y = a.read(x), a.read(y)
    return x if isinstance(y, int) and y == 1 else -x if isinstance(y, int) and y == -1 else x * y


@rule(aten.add.Tensor, aten.add.Scalar)
def add(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """X + alpha * y."""
    if is_state(y) and not is_state(x) and alpha == 1:
        x, y = y, x
    return add_to(a, x, times(a, y, alpha))


@rule(aten.sub.Tensor, aten.sub.Scalar)
def sub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """X - alpha * y."""
    return add_to(a, x, -times(a, y, alpha)) if is_state(x) else a.round(a.read(x) - times(a, y, alpha))


@rule(aten.rsub.Scalar, aten.rsub.Tensor)
def rsub(a: Arithmetic, x: Any, y: Any, alpha: Any = 1) -> Any:
    """Y - alpha * x."""
    return sub(a, y, x, alpha)


@rule(aten.mul.Tensor, aten.mul.Scalar)
def mul(a: Arithmetic, x: Any, y: Any) -> Any:
    """X * y; a state times a scalar stays a state."""
    if is_state(y) and not is_state(x):
        x, y = y, x
    if is_state(x):
        return x.times(y if isinstance(y, Scalar) else a.read(y))
    return a.round(times(a, x, y))


@rule(aten.div.Tensor, aten.div.Scalar)
def div(a: Arithmetic, x: Any, y: Any) -> Any:
    """X / y."""
    return a.round(a.read(x) / a.read(y))


@rule(aten.addcmul.default)
def addcmul(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """X + value * y * z."""
    return add_to(a, x, times(a, times(a, y, z), value))


@rule(aten.addcdiv.default)
def addcdiv(a: Arithmetic, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    """X + value * y / z."""
    return add_to(a, x, times(a, y, value) / a.read(z))


@rule(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(a: Arithmetic, x: Any, y: Any, weight: Any) -> Any:
    """X + weight * (y - x); for a state (1 - weight) * x + weight * y, with 1 - weight from the host."""
    if isinstance(x, Pair) and isinstance(weight, Scalar):
        return x.times(1 - weight).plus(times(a, y, weight))
    return a.round(a.read(x) + a.read(weight) * (a.read(y) - a.read(x)))


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
    return a.round(torch.sqrt(a.read(x)))


@rule(aten.reciprocal.default)
def reciprocal(a: Arithmetic, x: Any) -> Any:
    """1 / x."""
    return a.round(1.0 / a.read(x))


@rule(aten.rsqrt.default)
def rsqrt(a: Arithmetic, x: Any) -> Any:
    """1 / sqrt(x), in fp32 arithmetic two roundings."""
    return a.round(1.0 / torch.sqrt(a.read(x)))


@rule(aten.pow.Tensor_Scalar)
def power(a: Arithmetic, x: Any, exponent: float) -> Any:
    """X ** exponent for the exponents that are one exact-to-round operation: 2, 1, 0.5, -0.5, -1."""
    forms: dict[float, Callable[[Value], Value]] = {
        2: lambda v: v * v,
        1: lambda v: v,
        0.5: torch.sqrt,
        -0.5: lambda v: 1.0 / torch.sqrt(v),
        -1: lambda v: 1.0 / v,
    }
    if exponent not in forms:
        raise UnsupportedUpdate(f"the update raises a tensor to the power {exponent}; supported: {sorted(forms)}")
    return a.round(forms[exponent](a.read(x)))


@rule(aten.maximum.default)
def maximum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The larger: exact. Of two states the larger pair."""
    if isinstance(x, Pair) or isinstance(y, Pair):
        return Pair(a, larger(_as_pair(a, x), _as_pair(a, y)))
    return torch.maximum(a.read(x), a.read(y))


def _as_pair(a: Arithmetic, x: Any) -> Expansion:
    if isinstance(x, (Pair, PairSum)):
        return x.settled
    value = a.read(x)
    return Expansion(value, value * 0.0)


@rule(aten.minimum.default)
def minimum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The smaller: exact."""
    return torch.minimum(a.read(x), a.read(y))


@rule(aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default)
def same(a: Arithmetic, x: Any, **_: Any) -> Any:
    """X itself. A change of dtype between bf16 and fp32 is the arithmetic's business, not the optimizer's."""
    return x


@rule(aten.copy.default)
def copy(a: Arithmetic, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The source: what was there before is overwritten."""
    return source


@rule(aten.zeros_like.default, aten.zeros.default)
def zeros(a: Arithmetic, *_: Any, **__: Any) -> Any:
    """The number 0."""
    return 0.0


@rule(operator.getitem)
def item(a: Arithmetic, x: Any, index: int) -> Any:
    """One result of several."""
    return x[index]
