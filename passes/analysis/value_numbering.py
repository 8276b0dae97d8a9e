"""Value numbering: the value of each node of a captured graph as a sum of products in which numbers are wildcards.

Given::

    mul = v * s0;  sub = g - m;  clone = m.clone();  sub_1 = g - clone
    addcmul = aten.addcmul(mul, sub, sub_1, value=s1)

Result: `addcmul` is the sum of the products `v` and `(g - m) ** 2`, each times an unknown number.

A copy or cast has the value of its operand, `(1 - b) * x` is `x - b * x`, and `x.lerp(y, w)` is `x + w * (y - x)`. Two
nodes that compute the same value are the same factor, whatever the numbers in them, because a slot may hold another
number in the next step.

Factors that are indivisible are atoms. A coefficient is NaN where it is not known: it stays so in all arithmetic, and
no comparison with it is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import product as pairs
from typing import Any, NamedTuple

import torch
import torch.fx as fx

Product = frozenset[tuple[int, float]]
"""Atoms, each with its exponent; the empty product is 1."""

Sum = Mapping[Product, float]
"""Products with their coefficients. The empty sum is 0."""

ONE: Product = frozenset()
TERMS = 16
"""The number of terms beyond which sums are not multiplied out."""


class Atom(NamedTuple):
    """An indivisible factor: an input, or an operation on sums."""

    kind: str
    """`input`, `fill`, `abs`, `sign`, `power`, `sum`, `where`, `maximum`, `minimum`, ..., or an operation's name."""
    operands: tuple[Sum, ...]
    name: str = ""
    """The name of an input, or the exponent of a power."""


NEVER_NEGATIVE = {"abs", "norm", "power", "exp", "sigmoid", "mask", "fill"}
"""Kinds of atoms that cannot be negative; a tensor filled with a number holds 0, 1, or an initial value."""


def number(x: float) -> Sum:
    """A number as a sum."""
    return {ONE: float(x)} if x else {}


def plus(x: Sum, y: Sum) -> Sum:
    """x + y: products whose coefficient becomes 0 are dropped."""
    total = dict(x)
    for p, c in y.items():
        total[p] = total[p] + c if p in total else c
    return {p: c for p, c in total.items() if c != 0}


def minus(x: Sum, y: Sum) -> Sum:
    """x - y."""
    return plus(x, scaled(y, -1.0))


def scaled(x: Sum, factor: float) -> Sum:
    """x times a number."""
    return {p: c * factor for p, c in x.items()} if factor != 0 else {}


def is_known(x: Sum) -> bool:
    """Returns True if no coefficient of x is unknown: only then is x equal to what has the same coefficients."""
    return not any(map(math.isnan, x.values()))


def _power_of_number(x: float, exponent: float) -> float:
    """A power of a coefficient; unknown where it is not a real number."""
    return x**exponent if x > 0 or (x and exponent.is_integer()) else math.nan


class Algebra:
    """Sums of products over a growing table of atoms; what is equal has the same atoms.

    With `exact`, values that differ in their numbers only are different, so that their signs can be told.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.atoms: list[Atom] = []
        self._numbers: dict[Any, int] = {}
        self._inputs: list[frozenset[str]] = []  # of each atom: there may be exponentially many paths to one

    def atom(self, kind: str, *operands: Sum, name: str = "") -> Sum:
        """The sum that consists of this one factor; operands that differ only in their numbers give the same factor."""
        key: Any = kind, name, *map(frozenset, operands)  # the products alone: in the next step, numbers are others
        if self.exact:
            unknown = not all(map(is_known, operands))  # equal to nothing, not even to itself
            key = *key, *(frozenset(x.items()) for x in operands), len(self.atoms) if unknown else None
        if key not in self._numbers:
            self._numbers[key] = len(self.atoms)
            self.atoms.append(Atom(kind, operands, name))
            names = {name} if kind == "input" else {n for x in operands for n in self.inputs(x)}
            self._inputs.append(frozenset(names))
        return {frozenset({(self._numbers[key], 1.0)}): 1.0}

    def input(self, name: str) -> Product:
        """The product that consists of the input `name` alone."""
        (product,) = self.atom("input", name=name)
        return product

    def times(self, x: Sum, y: Sum) -> Sum:
        """x * y, multiplied out unless it is a square, or too long."""
        # (g - m) * (g - m) is the square of one factor, which cannot be negative; multiplied out, that would be lost.
        if (len(x) > 1 and x.keys() == y.keys()) or len(x) * len(y) > TERMS:
            x, y = self._factor(x), self._factor(y)
        return reduce(plus, (self._product(p, q, c * d) for (p, c), (q, d) in pairs(x.items(), y.items())), {})

    def over(self, x: Sum, y: Sum) -> Sum:
        """x / y."""
        return self.times(x, self.power(y, -1.0))

    def _factor(self, x: Sum) -> Sum:
        """x as a single product."""
        if len(x) <= 1:
            return x
        if not (self.exact and is_known(x)):
            return scaled(self.atom("sum", x), math.nan)
        # Sums that differ by a factor only are one atom, so that (x - y) * (2 * x - 2 * y) is a square.
        lead = x[min(x, key=sorted)]
        return scaled(self.atom("sum", scaled(x, 1 / lead)), lead)

    def _product(self, p: Product, q: Product, coefficient: float) -> Sum:
        exponents = dict(p)
        for a, e in q:
            exponents[a] = exponents.get(a, 0.0) + e
        return {frozenset((a, e) for a, e in exponents.items() if e): coefficient}

    def power(self, x: Sum, exponent: float) -> Sum:
        """x ** exponent; a power that is no whole number is one factor."""
        if not x or not exponent.is_integer():
            return self.atom("power", x, name=str(exponent)) if x else x
        ((p, c),) = self._factor(x).items()
        return {frozenset((a, e * exponent) for a, e in p if exponent): _power_of_number(c, exponent)}

    def sign(self, x: Sum) -> Sum:
        """The sign of x, as that of one product with the sign of its coefficient."""
        if not x:
            return x
        ((p, c),) = self._factor(x).items()
        return scaled(self.atom("sign", {p: 1.0}), c if math.isnan(c) else math.copysign(1.0, c))

    def between(self, x: Sum, min: Sum | None = None, max: Sum | None = None) -> Sum:
        """x, clamped from below, from above, or from both sides."""
        x = x if min is None else self.atom("maximum", x, min)
        return x if max is None else self.atom("minimum", x, max)

    def chosen(self, mask: Sum, x: Sum, y: Sum) -> Sum:
        """x where the mask is true, else y."""
        return x if x == y and is_known(x) else self.atom("where", x, y, mask)

    def alternatives(self, x: Sum, is_chosen: Callable[[int], bool] | None = None) -> list[Sum]:
        """The possible values of an element of x: every candidate of a `where`, a maximum or a clamp.

        With `is_chosen`, of those choices only for whose atoms it is true.
        """
        done: list[Sum] = []
        todo = [x]
        while todo and len(todo) + len(done) < 4 * TERMS:  # each choice doubles them: what is left then stays whole
            branches = self._branches(todo[0], is_chosen or self.is_choice)
            (todo if branches else done).extend(branches or todo[:1])
            del todo[0]
        return done + todo

    def _branches(self, x: Sum, is_chosen: Callable[[int], bool]) -> list[Sum]:
        for p, c in x.items():
            for a, e in p:
                if e == 1 and is_chosen(a):
                    rest = {q: d for q, d in x.items() if q != p}
                    others: Sum = {p - {(a, e)}: c}
                    return [plus(rest, self.times(others, of)) for of in self.atoms[a].operands[:2]]
        return []

    def is_choice(self, atom: int) -> bool:
        """Returns True if an atom may be either of its operands."""
        kind, operands, _ = self.atoms[atom]
        return kind in ("where", "maximum") or (kind == "minimum" and any(not self.inputs(x) for x in operands))

    def depends(self, atom: int, name: str) -> bool:
        """Returns True if an atom depends on the input `name`."""
        return name in self._inputs[atom]

    def inputs(self, x: Sum) -> set[str]:
        """Names of the inputs that x depends on."""
        return {name for p in x for name in self.support(p)}

    def support(self, p: Product) -> set[str]:
        """Names of the inputs that a product depends on; a tensor filled with a number has none."""
        return {name for a, _ in p for name in self._inputs[a]}


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
