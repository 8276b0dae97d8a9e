"""Which states accumulate slowly, seen from the graph: those are what `plus` expands.

Sums and averages of magnitudes, which cannot be negative (squares, absolute values, their powers and products): at a
decay near 1 such a state moves by less than half an ulp of bf16 a step, and stalls; a first moment, whose decay is
around 0.9, does not. Maxima with decay, which stall likewise. Sums without any decay. Copies and averages of the
parameter, which need what it needs (schedule-free's z, a lookahead's slow weights).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten

_FIRST_TERM = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default,
    aten._to_copy.default, aten.addcmul.default, aten.addcdiv.default, aten.sqrt.default,
}  # fmt: skip
"""Operations through which the sum that their first operand is stays a sum."""

_TWO_TERMS = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.lerp.Scalar, aten.lerp.Tensor, aten.rsub.Scalar,
}  # fmt: skip


def magnitude_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states of a captured update that accumulate a magnitude."""
    states = ((name, node) for name, node in _outputs(graph).items() if name != "param")
    return frozenset(name for name, node in states if any(map(_is_magnitude, _terms(node))))


def _terms(node: Any) -> Iterator[fx.Node]:
    """The terms of the sum that `node` is, scaled or not."""
    if not isinstance(node, fx.Node):
        return
    yield node
    if node.target in _TWO_TERMS:
        yield from _terms(node.args[0])
        yield from _terms(node.args[1])
    elif node.target in _FIRST_TERM and not _is_magnitude(node):
        yield from _terms(node.args[0])
        if len(node.args) > 1 and node.target in (aten.mul.Tensor, aten.mul.Scalar) and _is_scalar(node.args[0]):
            yield from _terms(node.args[1])


def slow_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that `plus` expands."""
    return magnitude_states(graph) | sum_states(graph) | maximum_states(graph)


def maximum_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that are a maximum with decay, `maximum(s * beta, x)`: it stalls as an average does."""
    states = ((name, node) for name, node in _outputs(graph).items() if name != "param")
    return frozenset(name for name, node in states if any(_is_decayed(x, name) for x in _maxima(node)))


def _maxima(node: Any) -> tuple[Any, ...]:
    return node.args if isinstance(node, fx.Node) and node.target is aten.maximum.default else ()


def _is_decayed(node: Any, name: str) -> bool:
    return _is_scaled(node) and any(_is_old(x, name) for x in node.args)


def _is_old(node: Any, name: str) -> bool:
    """Whether `node` is what the state was before the step, or what it starts with."""
    return _is_placeholder(node, name) or (isinstance(node, fx.Node) and node.target in _FILLS)


def sum_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that are sums without decay, or copies or averages of the parameter or of such a state."""
    states = {name: node for name, node in _outputs(graph).items() if name != "param"}
    precise = set(_versions(_outputs(graph)["param"]))
    found: set[str] = set()
    for _ in states:  # an average of an average is found in the next round
        found |= {name for name, node in states.items() if any(_is_old(n, name) for n in _kept(node))}
        found |= {name for name, node in states.items() if not precise.isdisjoint(_averaged(node))}
        precise.update(n for name in found for n in _kept(states[name]) if any(_is_old(k, name) for k in _kept(n)))
    return frozenset(found)


def idle_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that this update leaves as they are: it cannot tell what they accumulate."""
    return frozenset(name for name, node in _outputs(graph).items() if name != "param" and _is_placeholder(node, name))


def _outputs(graph: fx.Graph) -> dict[str, Any]:
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    assert isinstance(outputs, dict)
    return outputs


def _is_placeholder(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.target == name


_FILLS = {
    aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default, aten.ones_like.default, aten.ones.default,
    aten.new_ones.default, aten.full_like.default, aten.full.default, aten.new_full.default,
}  # fmt: skip
_SAME = {aten.clone.default, aten._to_copy.default, aten.detach.default}
_GROWS = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.addcmul.default,
    aten.addcdiv.default,
}
_LERPS = {aten.lerp.Scalar, aten.lerp.Tensor}


def _kept(node: Any) -> Iterator[fx.Node]:
    """`node`, and what it is the sum of with a coefficient of exactly 1."""
    if not isinstance(node, fx.Node):
        return
    yield node
    if node.target in _SAME | _GROWS:
        yield from _kept(node.args[0])
    if node.target is aten.add.Tensor and len(node.args) > 1 and not node.kwargs:
        yield from _kept(node.args[1])
    if node.target is aten.copy.default:
        yield from _kept(node.args[1])
    if node.target is aten.where.self:
        yield from _kept(node.args[1])
        yield from _kept(node.args[2])


def _averaged(node: Any) -> Iterator[fx.Node]:
    """`node`, what it is the sum of, and what it averages: `lerp(s, y, w)`, `a * s + b * y`."""
    for n in _kept(node):
        yield n
        if _is_average(n):
            yield from chain.from_iterable(_kept(_unscaled(x)) for x in n.args[:2])


def _is_average(node: fx.Node) -> bool:
    if node.target is not aten.add.Tensor:
        return node.target in _LERPS
    return _is_scaled(node.args[0]) and (_is_scaled(node.args[1]) or bool(node.kwargs))


def _is_scaled(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.mul.Tensor and any(map(_is_scalar, node.args))


def _unscaled(node: Any) -> Any:
    return next(x for x in node.args if not _is_scalar(x)) if _is_scaled(node) else node


def _versions(node: Any) -> Iterator[fx.Node]:
    """The parameter as it is updated, last to first."""
    while isinstance(node, fx.Node):
        yield node
        operands = [x for x in node.args if isinstance(x, fx.Node) and _leads_to_param(x)]
        node = operands[0] if operands else None


def _leads_to_param(node: fx.Node) -> bool:
    return _is_placeholder(node, "param") or any(
        _is_placeholder(x, "param") or (isinstance(x, fx.Node) and _leads_to_param(x)) for x in _summands(node)
    )


def _summands(node: fx.Node) -> tuple[Any, ...]:
    """The operands that a node is a sum of, scaled or not."""
    if node.target in _LERPS or node.target is aten.add.Tensor or node.target is aten.mul.Tensor:
        return node.args[:2]
    return node.args[:1] if node.target in _SAME | _GROWS | {aten.div.Tensor} else ()


def _is_scalar(x: Any) -> bool:
    return not isinstance(x, fx.Node) or (x.op == "placeholder" and str(x.target)[1:].isdigit())


_NEVER_NEGATIVE = {aten.abs.default, aten.square.default, aten.sqrt.default, aten.exp.default, aten.sigmoid.default}
_LIKE_ITS_OPERANDS = {
    aten.pow.Tensor_Scalar, aten.maximum.default, aten.minimum.default, aten.clamp.default, aten.clamp_min.default,
    aten.clamp_max.default, aten.reciprocal.default, aten.rsqrt.default, *_SAME,
}  # fmt: skip
"""Operations that make nothing negative of tensors that are not; numbers are taken to be positive."""


def _is_magnitude(node: Any) -> bool:
    """Whether `node` is a product that cannot be negative, or in which a factor is twice.

    `g * g * (1 - beta)` is both; `sign(v - g * g) * g * g`, which is as slow, the second.
    """
    if not isinstance(node, fx.Node):
        return False
    product = node.args[1:3] if node.target is aten.addcmul.default else (node,)
    factors = [f for x in product for f in _factors(x)]
    return len(set(factors)) < len(factors) or (bool(factors) and all(map(_is_not_negative, factors)))


def _is_not_negative(factor: fx.Node) -> bool:
    if factor.target in _LIKE_ITS_OPERANDS:
        return all(_is_magnitude(x) for x in factor.args if not _is_scalar(x))
    return factor.target in _NEVER_NEGATIVE


def _factors(node: Any) -> Iterator[fx.Node]:
    """The tensors that a product is made of; an even power has one of them twice."""
    if not isinstance(node, fx.Node) or _is_scalar(node):
        return
    if node.target is aten.square.default or (node.target is aten.pow.Tensor_Scalar and _is_even(node.args[1])):
        yield from (node.args[0], node.args[0])  # type: ignore[misc]  # nodes
    elif node.target in (aten.mul.Tensor, aten.mul.Scalar):
        yield from chain(_factors(node.args[0]), _factors(node.args[1]))
    else:
        yield node


def _is_even(exponent: Any) -> bool:
    return isinstance(exponent, (int, float)) and exponent != 0 and exponent % 2 == 0
