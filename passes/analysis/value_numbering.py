"""Value numbering: the value of each node of a captured graph as a sum of products in which numbers are wildcards.

Given::

    mul = v * s0;  sub = g - m;  clone = m.clone();  sub_1 = g - clone
    addcmul = aten.addcmul(mul, sub, sub_1, value=s1)

Result: `addcmul` is the sum of the products `v` and `(g - m) ** 2`, each times an unknown number.

A copy or cast has the value of its operand, `(1 - b) * x` is `x - b * x`, and `x.lerp(y, w)` is `x + w * (y - x)`. Two
nodes that compute the same value are the same factor, whatever the numbers in them, because a slot may hold another
number in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.passes.analysis.value_algebra import ONE, Algebra, Sum, minus, number, plus, scaled

aten = torch.ops.aten

Rule = Callable[..., Sum]
UNIT = number(1.0)


def _full(v: Algebra, *_: Any, **__: Any) -> Sum:
    return v.atom("number", name=str(len(v.atoms))) if v.exact else v.atom("fill", name="some number")


def _mask(name: str) -> Rule:
    return lambda v, *operands: v.atom("mask", *operands, name=name)


_TABLE: Mapping[str, Rule] = {
    "add.Tensor add.Scalar": lambda v, x, y, alpha=UNIT: plus(x, v.times(y, alpha)),
    "sub.Tensor sub.Scalar": lambda v, x, y, alpha=UNIT: minus(x, v.times(y, alpha)),
    "rsub.Tensor rsub.Scalar": lambda v, x, y, alpha=UNIT: minus(y, v.times(x, alpha)),
    "mul.Tensor mul.Scalar logical_and.default bitwise_and.Tensor": Algebra.times,
    "div.Tensor div.Scalar": Algebra.over,
    "addcmul.default": lambda v, x, y, z, value=UNIT: plus(x, v.times(v.times(y, z), value)),
    # Whatever ATen computes first: these are numbers without roundings.
    "addcdiv.default": lambda v, x, y, z, value=UNIT: plus(x, v.times(v.over(y, z), value)),
    "lerp.Scalar lerp.Tensor": lambda v, x, y, weight: plus(x, v.times(minus(y, x), weight)),
    "neg.default": lambda v, x: scaled(x, -1.0),
    "abs.default": lambda v, x: v.atom("abs", x),
    "sign.default sgn.default": Algebra.sign,
    "pow.Tensor_Scalar": lambda v, x, exponent: v.power(x, exponent.get(ONE, 0.0)),
    "square.default": lambda v, x: v.power(x, 2.0),
    "sqrt.default": lambda v, x: v.power(x, 0.5),
    "rsqrt.default": lambda v, x: v.power(x, -0.5),
    "reciprocal.default": lambda v, x: v.power(x, -1.0),
    "exp.default": lambda v, x: v.atom("exp", x),
    "sigmoid.default": lambda v, x: v.atom("sigmoid", x),
    "log.default": lambda v, x: v.atom("log", x),
    "maximum.default clamp_min.default clamp_min.Tensor": lambda v, x, y: v.atom("maximum", x, y),
    "minimum.default clamp_max.default clamp_max.Tensor": lambda v, x, y: v.atom("minimum", x, y),
    "clamp.default clamp.Tensor": Algebra.between,
    "where.self where.ScalarOther where.ScalarSelf where.Scalar": Algebra.chosen,
    "masked_fill.Scalar masked_fill.Tensor": lambda v, x, mask, value: v.chosen(mask, value, x),
    "index_put.default": lambda v, x, indices, values, accumulate=False: v.chosen(
        indices[0], plus(x, values) if accumulate else values, x
    ),
    "nan_to_num.default": lambda v, x, *_, **__: v.chosen(v.atom("mask", x, name="isnan"), {}, x),
    "clone.default detach.default alias.default lift_fresh.default _to_copy.default": lambda v, x, **_: x,
    "copy.default": lambda v, x, source, non_blocking=False: source,
    "zero.default": lambda v, x: {},
    "fill.Scalar": lambda v, x, value: value,
    "zeros_like.default new_zeros.default": lambda v, *_, **__: v.atom("fill", name="0"),
    "ones_like.default new_ones.default": lambda v, *_, **__: v.atom("fill", name="1"),
    "full_like.default full.default new_full.default": _full,
    "empty_like.default empty.memory_format new_empty.default": _full,
    "sum.default sum.dim_IntList mean.default mean.dim": lambda v, x, *_, **__: v.atom("total", x),
    "linalg_vector_norm.default": lambda v, x, *_, **__: v.atom("norm", x),
    **{f"{name}.Tensor {name}.Scalar": _mask(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{name: _mask(name) for name in ("logical_or.default bitwise_or.Tensor", "logical_not.default bitwise_not.default",
                                      "isnan.default", "isinf.default")},
}  # fmt: skip
"""How each aten operation acts on sums of products, by its overloads; others give an opaque factor."""

RULES: Mapping[Any, Rule] = {
    getattr(getattr(aten, name.split(".")[0]), name.split(".")[1]): rule
    for names, rule in _TABLE.items()
    for name in names.split()
}
"""By aten overload."""


class Values(Algebra):
    """The values of a captured graph's nodes; `opaque` nodes are treated as inputs with these names.

    With `numbers`, the slots have these values; one that is 0 may be anything in the next step, and is an input.
    """

    def __init__(
        self, graph: fx.Graph, opaque: Mapping[fx.Node, str] | None = None, numbers: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(exact=numbers is not None)
        self.numbers = numbers
        self.of: dict[fx.Node, Sum] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.of[node] = self._value(node, opaque or {})

    def _value(self, node: fx.Node, opaque: Mapping[fx.Node, str]) -> Sum:
        if node in opaque:
            return self.atom("input", name=opaque[node])
        if node.op == "placeholder":
            name = str(node.target)
            return self._slot(name) if is_slot(name) else self.atom("input", name=name)
        if node.target in RULES:
            args: Any = fx.node.map_arg(node.args, self._of)
            kwargs: Any = fx.node.map_arg(node.kwargs, self._of)
            return RULES[node.target](self, *map(_operand, args), **{k: _operand(x) for k, x in kwargs.items()})
        numbers = [x for x in node.args if isinstance(x, (int, float))]  # roll(x, 1) is not roll(x, 2)
        return self.atom(str(node.target), *(self.of[x] for x in node.all_input_nodes), name=str(numbers))

    def _slot(self, name: str) -> Sum:
        if self.numbers is None:
            return {ONE: math.nan}
        # A factor of 0 would drop a term that the next step may have, so a slot that is 0 is an unknown instead.
        return number(self.numbers[name]) or self.atom("input", name=name)

    def _of(self, node: fx.Node) -> Any:
        return self.of[node]

    def fills(self) -> list[Sum]:
        """The tensors filled with a number."""
        return [self.atom("fill", name=name) for kind, _, name in self.atoms if kind == "fill"]

    def changes(self, x: Sum, name: str, is_chosen: Callable[[int], bool] | None = None) -> Iterator[Change]:
        """What x, the new value of the state `name`, is made of, in each of its alternatives that change the state.

        Without `is_chosen`, these are of all choices that depend on the state.
        """
        own, by_state = self.input(name), lambda atom: self.is_choice(atom) and self.depends(atom, name)
        for leaf in self.alternatives(x, is_chosen or by_state):
            if leaf != {own: 1.0}:
                others = {p: c for p, c in leaf.items() if not own <= p}
                yield Change(leaf.get(own, 0.0), others, len(leaf) - len(others) > (own in leaf))


class Change(NamedTuple):
    """The new value of a state, as its old one times a number, and others: most states average, or add up."""

    kept: float
    """The coefficient of the old value: 0.999 for an average of a thousand steps, 1 for a sum."""
    others: Sum
    """The terms that do not have the old value as a factor; it may be inside of their factors."""
    is_scaled: bool
    """True if there are further terms with the old value, times something else than a number."""


def _operand(x: Any) -> Any:
    """A number as a sum, or a flag, which is false as its sum is; all else as it is."""
    return number(float(x)) if isinstance(x, (int, float)) else x


def is_slot(name: str) -> bool:
    """Returns True if a placeholder of this name is a number; a state may be called `m1`, but never `s1`."""
    return name.startswith("s") and name[1:].isdigit()
