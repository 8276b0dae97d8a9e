"""Evidence that a state accumulates what cannot be negative: squares, absolute values, their powers and products."""

from __future__ import annotations

from functools import cache

from collage_neuron.passes.analysis.polynomials import NEVER_NEGATIVE, ONE, SELECTS, Product, Sum
from collage_neuron.passes.analysis.value_numbering import Values


class Evidence:
    """Finds out whether a state accumulates magnitudes; `found` are the states known to do so already."""

    def __init__(self, values: Values, found: frozenset[str]) -> None:
        self.values, self.found = values, found
        self._inside = cache(self._look_inside)  # there may be exponentially many paths to an atom
        self._not_negative = cache(self._cannot_be_negative)

    def of_sum(self, x: Sum, name: str) -> bool:
        """Returns True if a term of x shows that the state `name` accumulates magnitudes."""
        return any(self._of_product(p, name) for p in x)

    def _of_product(self, p: Product, name: str) -> bool:
        if not self.values.support(p) - {name}:
            return False
        unknown = [a for a, e in p if e % 2 and not self._not_negative(a) and not self._is_moved_sign(a, name)]
        return not unknown or (len(unknown) == 1 and self._inside(unknown[0], name))

    def _look_inside(self, atom: int, name: str) -> bool:
        """Looks into the operand of a function, since a state may be the root or the logarithm of a sum."""
        kind, operands, _ = self.values.atoms[atom]
        if kind == "minimum":
            operands = tuple(x for x in operands if name in self.values.inputs(x))
        return kind in ("sum", "log", "minimum") and any(self.of_sum(x, name) for x in operands)

    def _is_moved_sign(self, atom: int, name: str) -> bool:
        """Returns True for the sign of a difference of magnitudes: `v - sign(v - g * g) * g * g` is as slow."""
        kind, operands, _ = self.values.atoms[atom]
        return kind == "sign" and self._inside_sum(operands[0], name)

    def _inside_sum(self, x: Sum, name: str) -> bool:
        return any(self._inside(a, name) for p in x for a, _ in p)

    def _cannot_be_negative(self, atom: int) -> bool:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":
            return name in self.found
        if kind == "maximum":
            return any(x and x.keys() != {ONE} and self._all(x) for x in operands)
        if kind in SELECTS:
            return all(map(self._all, operands[:2]))
        return kind in NEVER_NEGATIVE or (kind in ("sum", "total") and self._all(operands[0]))

    def _all(self, x: Sum) -> bool:
        """Returns True if every term of x cannot be negative; numbers are assumed to be positive."""
        return all((c is None or c > 0) and all(e % 2 == 0 or self._not_negative(a) for a, e in p)
                   for p, c in x.items())  # fmt: skip
