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

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product as pairs
from typing import Any, NamedTuple

import torch
import torch.fx as fx

aten = torch.ops.aten

Product = frozenset[tuple[int, float]]
"""Atoms, each with its exponent; the empty product is 1."""

Sum = Mapping[Product, float | None]
"""Products with their coefficients; None is an unknown number (a slot). The empty sum is 0."""

ONE: Product = frozenset()
_TERMS = 16
"""The number of terms beyond which sums are not multiplied out."""


class Atom(NamedTuple):
    """An indivisible factor: an input, or an operation on sums."""

    kind: str
    """`input`, `fill`, `abs`, `sign`, `power`, `sum`, `where`, `maximum`, `minimum`, ..., or an operation's name."""
    operands: tuple[Sum, ...]
    name: str = ""
    """The name of an input, or the exponent of a power."""


def plus(x: Sum, y: Sum) -> Sum:
    """x + y: exact coefficients are added, and products whose coefficient becomes 0 are dropped."""
    total = dict(x)
    for p, c in y.items():
        total[p] = _both(operator.add, total[p], c) if p in total else c
    return {p: c for p, c in total.items() if c != 0}


def scaled(x: Sum, factor: float | None) -> Sum:
    """x times a number."""
    return {p: _both(operator.mul, c, factor) for p, c in x.items()} if factor != 0 else {}


def _both(f: Callable[[float, float], float], x: float | None, y: float | None) -> float | None:
    return None if x is None or y is None else f(x, y)


class Values:
    """The values of a captured graph's nodes; `opaque` nodes are treated as inputs with these names."""

    def __init__(self, graph: fx.Graph, opaque: Mapping[fx.Node, str] | None = None) -> None:
        self.atoms: list[Atom] = []
        self.of: dict[fx.Node, Sum] = {}
        self._numbers: dict[Any, int] = {}
        self._inputs: list[frozenset[str]] = []  # of each atom: there may be exponentially many paths to one
        for node in graph.nodes:
            if node.op != "output":
                self.of[node] = self._value(node, opaque or {})

    def _value(self, node: fx.Node, opaque: Mapping[fx.Node, str]) -> Sum:
        if node in opaque:
            return self.atom("input", name=opaque[node])
        if node.op == "placeholder":
            name = str(node.target)
            return {ONE: None} if is_slot(name) else self.atom("input", name=name)
        args: Any = fx.node.map_arg(node.args, self._of)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._of)
        if node.target in _RULES:
            return _RULES[node.target](self, *args, **kwargs)
        operands = [self.of[x] for x in node.all_input_nodes]
        return self.atom(str(node.target), *operands, name=str([x for x in args if isinstance(x, (int, float))]))

    def _of(self, node: fx.Node) -> Any:
        return self.of[node]

    def atom(self, kind: str, *operands: Sum, name: str = "") -> Sum:
        """The sum that consists of this one factor; operands that differ only in their numbers give the same factor."""
        key = kind, name, *map(frozenset, operands)
        if key not in self._numbers:
            self._numbers[key] = len(self.atoms)
            self.atoms.append(Atom(kind, operands, name))
            names = {name} if kind == "input" else {n for x in operands for n in self.inputs(x)}
            self._inputs.append(frozenset(names))
        return {frozenset({(self._numbers[key], 1.0)}): 1.0}

    def fills(self) -> list[Sum]:
        """The tensors filled with a number."""
        return [self.atom("fill", name=name) for kind, _, name in self.atoms if kind == "fill"]

    def times(self, x: Sum, y: Sum) -> Sum:
        """x * y, multiplied out unless it is a square, or too long."""
        if (len(x) > 1 and x.keys() == y.keys()) or len(x) * len(y) > _TERMS:
            x, y = self._factor(x), self._factor(y)
        return reduce(plus, (self._product(p, q, _both(operator.mul, c, d)) for (p, c), (q, d) in
                             pairs(x.items(), y.items())), {})  # fmt: skip

    def _factor(self, x: Sum) -> Sum:
        """x as a single product."""
        return scaled(self.atom("sum", x), None) if len(x) > 1 else x

    def _product(self, p: Product, q: Product, coefficient: float | None) -> Sum:
        """The product of two, with `x * sign(x)` as `|x|`."""
        exponents = dict(p)
        for a, e in q:
            exponents[a] = exponents.get(a, 0.0) + e
        for a in [a for a, e in exponents.items() if self.atoms[a].kind == "sign" and e % 2]:
            ((of,),) = self.atoms[a].operands[0]
            if exponents.get(of[0], 0.0) % 2 == 1 and a in exponents:
                (magnitude,) = self.absolute({frozenset({(of[0], exponents.pop(of[0]))}): 1.0})
                exponents[a] -= 1
                return self._product(_nonzero(exponents), magnitude, coefficient)
        return {_nonzero(exponents): coefficient}

    def power(self, x: Sum, exponent: float) -> Sum:
        """x ** exponent; the root of an even power is that of the absolute value."""
        if not x:
            return x
        ((p, c),) = self._factor(x).items()
        if exponent.is_integer():
            return {frozenset((a, e * exponent) for a, e in p if exponent): _number_power(c, exponent)}
        if exponent < 0:
            return self.power(self.power(x, -exponent), -1.0)
        if not all(e % 2 == 0 or self._is_magnitude(a) for a, e in p):
            return self.atom("power", x, name=str(exponent))
        roots = (self._root(a, e * exponent) for a, e in p)
        return reduce(self.times, roots, {ONE: _number_power(c, exponent)})

    def _root(self, atom: int, exponent: float) -> Sum:
        """The root of an even power of one factor: a power of |factor|, or of the factor where that is the same."""
        if exponent % 2 == 0 or self._is_magnitude(atom):
            return {frozenset({(atom, exponent)}): 1.0}
        return self.power(self.atom("abs", {frozenset({(atom, 1.0)}): 1.0}), exponent)

    def absolute(self, x: Sum) -> Sum:
        """|x|: of a product, the product of the absolute values."""
        if not x:
            return x
        ((p, c),) = self._factor(x).items()
        result: Sum = {ONE: None if c is None else abs(c)}
        for a, e in p:
            if e % 2 == 0 or self._is_magnitude(a):
                result = self.times(result, {frozenset({(a, e)}): 1.0})
            else:
                ((magnitude,),) = self.atom("abs", {frozenset({(a, 1.0)}): 1.0})
                result = self.times(result, {frozenset({(magnitude[0], e)}): 1.0})
        return result

    def sign(self, x: Sum) -> Sum:
        """The sign of x: of a product, the product of the signs."""
        ((p, c),) = self._factor(x).items() or ((ONE, 0.0),)
        signs = (self.atom("sign", {frozenset({(a, 1.0)}): 1.0}) for a, e in p if e % 2 and not self._is_magnitude(a))
        return reduce(self.times, signs, {ONE: c if c is None else (c > 0) - (c < 0)} if c != 0 else {})

    def _is_magnitude(self, atom: int) -> bool:
        return self.atoms[atom].kind in NEVER_NEGATIVE

    def largest(self, x: Sum, y: Sum) -> Sum:
        """maximum(x, y); for y = -x or y = |x| it is |x|."""
        if x and plus(x, y) == {} and None not in x.values():
            return self.absolute(x)
        return y if self._is_absolute(y, x) else x if self._is_absolute(x, y) else self.atom("maximum", x, y)

    def smallest(self, x: Sum, y: Sum) -> Sum:
        """minimum(x, y); for y = |x| it is x."""
        return x if self._is_absolute(y, x) else y if self._is_absolute(x, y) else self.atom("minimum", x, y)

    def _is_absolute(self, x: Sum, of: Sum) -> bool:
        """Returns True if x is exactly |of|."""
        return len(of) == 1 and None not in of.values() and x == self.absolute(of)

    def chosen(self, mask: Sum, x: Sum, y: Sum) -> Sum:
        """x where the mask is true, else y; for y = -x and a mask that compares x with a number it is |x|."""
        if x == y and None not in x.values():
            return x
        if x and plus(x, y) == {} and None not in x.values() and self._compares(mask, x):
            return self.absolute(x)
        return self.atom("where", x, y, mask)

    def _compares(self, mask: Sum, x: Sum) -> bool:
        atoms = [self.atoms[a] for p in mask for a, _ in p]
        return len(atoms) == 1 and atoms[0].kind == "mask" and {frozenset(o) for o in atoms[0].operands} <= {
            frozenset(x), frozenset({ONE}), frozenset()
        }  # fmt: skip

    def inputs(self, x: Sum) -> set[str]:
        """Names of the inputs that x depends on."""
        return {name for p in x for name in self.support(p)}

    def support(self, p: Product) -> set[str]:
        """Names of the inputs that a product depends on; a tensor filled with a number has none."""
        return {name for a, _ in p for name in self._inputs[a]}

    def alternatives(self, x: Sum) -> list[Sum]:
        """The possible values of an element of x: every candidate of a `where`, a maximum or a clamp."""
        done: list[Sum] = []
        todo = [x]
        while todo and len(todo) + len(done) < 4 * _TERMS:
            branches = self._branches(todo[0])
            (todo if branches else done).extend(branches or todo[:1])
            del todo[0]
        return done + todo

    def _branches(self, x: Sum) -> list[Sum]:
        for p, c in x.items():
            for a, e in p:
                if self._is_choice(a) and e == 1:
                    rest = {q: d for q, d in x.items() if q != p}
                    others: Sum = {p - {(a, e)}: c}
                    return [plus(rest, self.times(others, of)) for of in self.atoms[a].operands[:2]]
        return []

    def _is_choice(self, atom: int) -> bool:
        """Returns True if an atom may be either of its operands; `minimum(g, g.abs())` is always `g`."""
        kind, operands, _ = self.atoms[atom]
        return kind in ("where", "maximum") or (kind == "minimum" and any(not self.inputs(x) for x in operands))


def _number_power(x: float | None, exponent: float) -> float | None:
    return x**exponent if x is not None and (x > 0 or (x and exponent.is_integer())) else None


def _nonzero(exponents: Mapping[int, float]) -> Product:
    return frozenset((a, e) for a, e in exponents.items() if e)


def is_slot(name: str) -> bool:
    """Returns True if a placeholder of this name is a number."""
    return name[1:].isdigit()


NEVER_NEGATIVE = {"abs", "power", "exp", "sigmoid", "mask", "fill"}
"""Kinds of atoms that cannot be negative; a tensor filled with a number holds 0, 1, or an initial value."""

SELECTS = {"where", "maximum", "minimum"}
"""Kinds of atoms that select one of their first two operands."""

Rule = Callable[..., Sum]
_RULES: dict[Any, Rule] = {}


def _rule(*targets: Any) -> Callable[[Rule], Rule]:
    def register(f: Rule) -> Rule:
        _RULES.update(dict.fromkeys(targets, f))
        return f

    return register


def _sum(x: Any) -> Sum:
    """An operand as a sum; a number is exact."""
    return x if isinstance(x, dict) else {ONE: float(x)} if x else {}


@_rule(aten.add.Tensor, aten.add.Scalar)
def _add(v: Values, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return plus(_sum(x), v.times(_sum(y), _sum(alpha)))


@_rule(aten.sub.Tensor, aten.sub.Scalar)
def _sub(v: Values, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return plus(_sum(x), scaled(v.times(_sum(y), _sum(alpha)), -1.0))


@_rule(aten.rsub.Tensor, aten.rsub.Scalar)
def _rsub(v: Values, x: Any, y: Any, alpha: Any = 1) -> Sum:
    return _sub(v, y, x, alpha)


@_rule(aten.mul.Tensor, aten.mul.Scalar, aten.logical_and.default, aten.bitwise_and.Tensor)
def _mul(v: Values, x: Any, y: Any) -> Sum:
    return v.times(_sum(x), _sum(y))


@_rule(aten.div.Tensor, aten.div.Scalar)
def _div(v: Values, x: Any, y: Any) -> Sum:
    return v.times(_sum(x), v.power(_sum(y), -1.0))


@_rule(aten.addcmul.default)
def _addcmul(v: Values, x: Any, y: Any, z: Any, value: Any = 1) -> Sum:
    return _add(v, x, v.times(_sum(y), _sum(z)), value)


@_rule(aten.addcdiv.default)
def _addcdiv(v: Values, x: Any, y: Any, z: Any, value: Any = 1) -> Sum:
    return _add(v, x, _div(v, y, z), value)


@_rule(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(v: Values, x: Any, y: Any, weight: Any) -> Sum:
    return _add(v, x, _sub(v, y, x), weight)


@_rule(aten.neg.default)
def _neg(v: Values, x: Any) -> Sum:
    return scaled(_sum(x), -1.0)


@_rule(aten.abs.default)
def _abs(v: Values, x: Any) -> Sum:
    return v.absolute(_sum(x))


@_rule(aten.sign.default, aten.sgn.default)
def _sign(v: Values, x: Any) -> Sum:
    return v.sign(_sum(x))


@_rule(aten.pow.Tensor_Scalar)
def _pow(v: Values, x: Any, exponent: float) -> Sum:
    return v.power(_sum(x), float(exponent))


@_rule(aten.square.default)
def _square(v: Values, x: Any) -> Sum:
    return v.power(_sum(x), 2.0)


@_rule(aten.sqrt.default)
def _sqrt(v: Values, x: Any) -> Sum:
    return v.power(_sum(x), 0.5)


@_rule(aten.rsqrt.default)
def _rsqrt(v: Values, x: Any) -> Sum:
    return v.power(_sum(x), -0.5)


@_rule(aten.reciprocal.default)
def _reciprocal(v: Values, x: Any) -> Sum:
    return v.power(_sum(x), -1.0)


@_rule(aten.exp.default)
def _exp(v: Values, x: Any) -> Sum:
    return v.atom("exp", _sum(x))


@_rule(aten.sigmoid.default)
def _sigmoid(v: Values, x: Any) -> Sum:
    return v.atom("sigmoid", _sum(x))


@_rule(aten.log.default)
def _log(v: Values, x: Any) -> Sum:
    return v.atom("log", _sum(x))


@_rule(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def _maximum(v: Values, x: Any, y: Any) -> Sum:
    return v.largest(_sum(x), _sum(y))


@_rule(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def _minimum(v: Values, x: Any, y: Any) -> Sum:
    return v.smallest(_sum(x), _sum(y))


@_rule(aten.clamp.default, aten.clamp.Tensor)
def _clamp(v: Values, x: Any, min: Any = None, max: Any = None) -> Sum:
    x = x if min is None else _maximum(v, x, min)
    return _sum(x) if max is None else _minimum(v, x, max)


@_rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def _where(v: Values, mask: Any, x: Any, y: Any) -> Sum:
    return v.chosen(_sum(mask), _sum(x), _sum(y))


@_rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def _masked_fill(v: Values, x: Any, mask: Any, value: Any) -> Sum:
    return v.chosen(_sum(mask), _sum(value), _sum(x))


@_rule(aten.index_put.default)
def _index_put(v: Values, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Sum:
    masks = [_sum(i) for i in indices]
    return v.chosen(masks[0], plus(_sum(x), _sum(values)) if accumulate else _sum(values), _sum(x))


@_rule(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten._to_copy.default)
def _same(v: Values, x: Any, **_: Any) -> Sum:
    return _sum(x)


@_rule(aten.copy.default)
def _copy(v: Values, x: Any, source: Any, non_blocking: bool = False) -> Sum:
    return _sum(source)


@_rule(aten.zero.default)
def _zero(v: Values, x: Any) -> Sum:
    return {}


@_rule(aten.fill.Scalar)
def _fill(v: Values, x: Any, value: Any) -> Sum:
    return _sum(value)


@_rule(aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default)
def _zeros(v: Values, *_: Any, **__: Any) -> Sum:
    return v.atom("fill", name="0")


@_rule(aten.ones_like.default, aten.ones.default, aten.new_ones.default)
def _ones(v: Values, *_: Any, **__: Any) -> Sum:
    return v.atom("fill", name="1")


@_rule(
    aten.full_like.default, aten.full.default, aten.new_full.default,
    aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default,
)  # fmt: skip
def _full(v: Values, *_: Any, **__: Any) -> Sum:
    return v.atom("fill", name="some number")


def _mask_rule(name: str) -> Rule:
    def mask(v: Values, *operands: Any) -> Sum:
        return v.atom("mask", *map(_sum, operands), name=name)

    return mask


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _packet: Any = getattr(aten, _name)
    _rule(_packet.Tensor, _packet.Scalar)(_mask_rule(_name))
for _target in (aten.logical_or.default, aten.bitwise_or.Tensor, aten.logical_not.default, aten.bitwise_not.default):
    _rule(_target)(_mask_rule(str(_target)))
