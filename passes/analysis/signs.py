"""Finds the states that cannot become negative, and so may have a format without signs.

By induction: if no such state is negative before a step, none is after it. The numbers of the update (learning rates,
decays) are those of a step at hand, since their signs and sizes matter: `v + w * (g * g - v)` needs w between 0 and 1.
What cannot be shown counts as signed. It has a wider format then, and no wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from collage_neuron.passes.analysis.polynomials import NEVER_NEGATIVE, Product, Sum
from collage_neuron.passes.analysis.value_numbering import Values


def nonnegative(values: Values, new: Mapping[str, Sum]) -> frozenset[str]:
    """Names of the states that an update leaves at 0 or above, if they were; `new` are their values after the step."""
    found = frozenset(new) - {"param", "grad"}
    while True:
        signs = _Signs(values, found)
        now = frozenset(name for name in found if signs.of_sum(new[name]))
        if now == found:
            return found
        found = now


class _Signs:
    """Tells values that cannot be negative; `found` are the states that are assumed not to be."""

    def __init__(self, values: Values, found: frozenset[str]) -> None:
        self.values, self.found = values, found
        self._of_atom = cache(self._find)  # there may be exponentially many paths to an atom

    def of_sum(self, x: Sum) -> bool:
        """Returns True if no term of x can be negative, or none but one that is smaller than another (Yogi)."""
        return all(self._of_product(p, c) or self._is_smaller(p, c, x) for p, c in x.items())

    def _of_product(self, p: Product, c: float | None) -> bool:
        return c is not None and c > 0 and all(e % 2 == 0 or self._of_atom(a) for a, e in p)

    def _is_smaller(self, p: Product, c: float | None, x: Sum) -> bool:
        """Returns True for the second term of `v - c * sign(v - y) * y` with c from 0 to 1: only v > y decreases v."""
        signs = [(a, e) for a, e in p if self.values.atoms[a].kind == "sign" and e == 1]
        if len(signs) != 1 or c is None or not -1 <= c <= 1:
            return False
        (of,) = self.values.atoms[signs[0][0]].operands
        rest = p - set(signs)
        olds = [v for v in x if x[v] == 1 and self._of_product(v, 1.0)]
        return self._of_product(rest, 1.0) and any(self._is_difference(of, v, rest, c) for v in olds)

    def _is_difference(self, of: Sum, v: Product, y: Product, c: float) -> bool:
        """Returns True if `of` is v - y, or y - v for a positive c, as one factor."""
        ((factor,),) = of
        kind, operands, _ = self.values.atoms[factor[0]]
        if kind != "sum" or operands[0].keys() != {v, y}:
            return False
        up, down = operands[0][v], operands[0][y]
        return up is not None and down is not None and up == -down and (up > 0) == (c < 0)

    def _find(self, atom: int) -> bool:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":
            return name in self.found
        if kind == "maximum":
            return any(map(self.of_sum, operands))
        if kind in ("where", "minimum"):
            return all(map(self.of_sum, operands[:2]))
        return kind in NEVER_NEGATIVE or (kind in ("sum", "total") and self.of_sum(operands[0]))
