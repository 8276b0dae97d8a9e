"""Finds the states that cannot become negative, and those that accumulate magnitudes: squares, sizes, their products.

`nonnegative` is a proof, by which a state may have a format without signs. By induction: if no such state is negative
before a step, none is after it. The numbers of the update (learning rates, decays) are those of a step at hand, since
their signs and sizes matter: `v + w * (g * g - v)` needs w between 0 and 1. What cannot be shown counts as signed. It
has a wider format then, and no wrong one.

`magnitudes` is the same for whatever numbers a step has, which are assumed to be positive where they are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache

from collage_neuron.passes.analysis.value_numbering import NEVER_NEGATIVE, ONE, Product, Sum, Values


def nonnegative(values: Values, new: Mapping[str, Sum]) -> frozenset[str]:
    """Names of the states that an update leaves at 0 or above, if they were; `new` are their values after the step."""
    states = frozenset(new) - {"param", "grad"}
    while True:  # the largest set that follows from itself
        signs = Signs(values, states)
        now = frozenset(name for name in states if signs.of_sum(new[name]))
        if now == states:
            return states
        states = now


def magnitudes(values: Values, next_: Mapping[str, list[Sum]]) -> frozenset[str]:
    """Names of the states of which an alternative in `next_` adds to the old value what cannot be negative.

    The smallest such set: an average of an average of squares is one of magnitudes too, but what is only multiplied by
    a number in each step (Rprop's step sizes) is none.
    """
    states = frozenset[str]()
    while True:
        now = frozenset(n for n, leaves in next_.items() if any(_adds_magnitudes(values, x, n, states) for x in leaves))
        if now == states:
            return states
        states = now


def _adds_magnitudes(values: Values, x: Sum, name: str, states: frozenset[str]) -> bool:
    """Returns True if a term of x shows it: the others may be what a square was multiplied out to, or a constant."""
    signs = Signs(values, states, positive_numbers=True)
    return any(signs.of_term(p, math.nan, x) for p in x if values.support(p) - {name})


class Signs:
    """Tells values that cannot be negative; `states` are the states that are assumed not to be.

    With `positive_numbers`, numbers that are not known are assumed to be positive, but a bound that is a number
    (`clamp(min=s0)`) shows nothing.
    """

    def __init__(self, values: Values, states: frozenset[str], positive_numbers: bool = False) -> None:
        self.values, self.states, self.positive_numbers = values, states, positive_numbers
        self._of_atom = cache(self._find)  # there may be exponentially many paths to an atom

    def of_sum(self, x: Sum) -> bool:
        """Returns True if no term of x can be negative, or none but one that is smaller than another (Yogi)."""
        return all(self.of_term(p, c, x) for p, c in x.items())

    def of_term(self, p: Product, c: float, x: Sum) -> bool:
        """Returns True for a term c * p of x that cannot be negative, or is smaller than another one."""
        return self._of_product(p, c) or self._is_smaller(p, c, x)

    def _of_product(self, p: Product, c: float) -> bool:
        is_positive = c > 0 or (self.positive_numbers and math.isnan(c))
        return is_positive and all(e % 2 == 0 or self._of_atom(a) for a, e in p)

    def _is_smaller(self, p: Product, c: float, x: Sum) -> bool:
        """Returns True for the second term of `v - c * sign(v - y) * y` with c from 0 to 1: only v > y decreases v."""
        signs = [(a, e) for a, e in p if self.values.atoms[a].kind == "sign" and e == 1]
        if len(signs) != 1 or not (-1 <= c <= 1 or (self.positive_numbers and math.isnan(c))):
            return False
        (of,) = self.values.atoms[signs[0][0]].operands
        rest = p - set(signs)
        olds = [v for v in x if self.positive_numbers or (x[v] == 1 and self._of_product(v, 1.0))]
        return self._of_product(rest, 1.0) and any(self._is_difference(of, v, rest, c) for v in olds)

    def _is_difference(self, of: Sum, v: Product, y: Product, c: float) -> bool:
        """Returns True if `of` is v - y, or y - v for a positive c, as one factor."""
        factors = [self.values.atoms[a] for p in of for a, _ in p]
        kind, operands, _ = factors[0]
        if len(factors) > 1 or kind != "sum" or operands[0].keys() != {v, y}:
            return False
        up, down = operands[0][v], operands[0][y]
        return up == -down and (math.isnan(c) or (up > 0) == (c < 0))

    def _find(self, atom: int) -> bool:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":
            return name in self.states
        if kind == "maximum":  # one bound from below is enough
            return any(self.of_sum(x) for x in operands if not (self.positive_numbers and x.keys() <= {ONE}))
        if kind in ("where", "minimum"):
            return all(map(self.of_sum, operands[:2]))
        return kind in NEVER_NEGATIVE or (kind in ("sum", "total") and self.of_sum(operands[0]))
