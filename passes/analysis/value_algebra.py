"""Sums of products of indivisible factors (atoms), and what arithmetic makes of them.

This is what a value in an update is equal to, whatever the numbers of a step are (`value_numbering`). A coefficient is
NaN where it is not known: it stays so in all arithmetic, and no comparison with it is true.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from itertools import product as pairs
from typing import Any, NamedTuple

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
