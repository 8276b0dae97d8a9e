"""Arithmetic on sums of products: what the operations of an update make of them, with factors that are numbered."""

from __future__ import annotations

import operator
from functools import reduce
from itertools import product as pairs
from typing import Any

from collage_neuron.passes.analysis.polynomials import (
    NEVER_NEGATIVE,
    ONE,
    TERMS,
    Atom,
    Product,
    Sum,
    both,
    nonzero,
    number_power,
    plus,
    scaled,
)  # fmt: skip


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
        key: Any = kind, name, *map(frozenset, operands)
        if self.exact:
            unknown = any(None in x.values() for x in operands)  # equal to nothing, not even to itself
            key = *key, *(frozenset(x.items()) for x in operands), len(self.atoms) if unknown else None
        if key not in self._numbers:
            self._numbers[key] = len(self.atoms)
            self.atoms.append(Atom(kind, operands, name))
            names = {name} if kind == "input" else {n for x in operands for n in self.inputs(x)}
            self._inputs.append(frozenset(names))
        return {frozenset({(self._numbers[key], 1.0)}): 1.0}

    def times(self, x: Sum, y: Sum) -> Sum:
        """x * y, multiplied out unless it is a square, or too long."""
        if (len(x) > 1 and x.keys() == y.keys()) or len(x) * len(y) > TERMS:
            x, y = self._factor(x), self._factor(y)
        return reduce(plus, (self._product(p, q, both(operator.mul, c, d)) for (p, c), (q, d) in
                             pairs(x.items(), y.items())), {})  # fmt: skip

    def _factor(self, x: Sum) -> Sum:
        """x as a single product."""
        if len(x) <= 1:
            return x
        lead = x[min(x, key=sorted)] if self.exact and None not in x.values() else None
        return scaled(self.atom("sum", x if lead is None else scaled(x, 1 / lead)), lead)

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
                return self._product(nonzero(exponents), magnitude, coefficient)
        return {nonzero(exponents): coefficient}

    def power(self, x: Sum, exponent: float) -> Sum:
        """x ** exponent; the root of an even power is that of the absolute value."""
        if not x:
            return x
        ((p, c),) = self._factor(x).items()
        if exponent.is_integer():
            return {frozenset((a, e * exponent) for a, e in p if exponent): number_power(c, exponent)}
        if exponent < 0:
            return self.power(self.power(x, -exponent), -1.0)
        if not all(e % 2 == 0 or self._is_magnitude(a) for a, e in p):
            return self.atom("power", x, name=str(exponent))
        roots = (self._root(a, e * exponent) for a, e in p)
        return reduce(self.times, roots, {ONE: number_power(c, exponent)})

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
        if x and plus(x, y) == {} and None not in x.values() and self._compares(mask, x) and not self.exact:
            return self.absolute(x)  # or -|x|: only its size is known
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
