"""Sums of products of indivisible factors, with numbers as coefficients of which some are not known.

What a value in an update is equal to, whatever the numbers of a step are (`passes/analysis/value_numbering.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

Product = frozenset[tuple[int, float]]
"""Atoms, each with its exponent; the empty product is 1."""

Sum = Mapping[Product, float | None]
"""Products with their coefficients; None is an unknown number (a slot). The empty sum is 0."""

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


def plus(x: Sum, y: Sum) -> Sum:
    """x + y: exact coefficients are added, and products whose coefficient becomes 0 are dropped."""
    total = dict(x)
    for p, c in y.items():
        total[p] = both(operator.add, total[p], c) if p in total else c
    return {p: c for p, c in total.items() if c != 0}


def scaled(x: Sum, factor: float | None) -> Sum:
    """x times a number."""
    return {p: both(operator.mul, c, factor) for p, c in x.items()} if factor != 0 else {}


def both(f: Callable[[float, float], float], x: float | None, y: float | None) -> float | None:
    """f of two coefficients; unknown if either is."""
    return None if x is None or y is None else f(x, y)


def number_power(x: float | None, exponent: float) -> float | None:
    """A power of a coefficient; unknown where it is not a real number."""
    return x**exponent if x is not None and (x > 0 or (x and exponent.is_integer())) else None


def nonzero(exponents: Mapping[int, float]) -> Product:
    """The product of atoms with these exponents."""
    return frozenset((a, e) for a, e in exponents.items() if e)


NEVER_NEGATIVE = {"abs", "norm", "power", "exp", "sigmoid", "mask", "fill"}
"""Kinds of atoms that cannot be negative; a tensor filled with a number holds 0, 1, or an initial value."""

SELECTS = {"where", "maximum", "minimum"}
"""Kinds of atoms that select one of their first two operands."""
