"""Parity: whether a value changes its sign with the gradient, as a first moment does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from collage_neuron.passes.analysis.polynomials import ONE, Product, Sum
from collage_neuron.passes.analysis.value_numbering import Values


class Parity:
    """The parity of values: 1 if they change sign with the gradient and the parameter, 0 if not, 2 for numbers."""

    def __init__(self, values: Values, states: Mapping[str, int | None]) -> None:
        self.values, self.inputs = values, {"param": 1, "grad": 1, **states}
        self._of_atom = cache(self._find)

    def of_sum(self, x: Sum) -> int | None:
        found = [0 if p == ONE else self._of_product(p) for p in x]
        return _same(found) if x.keys() - {ONE} else 2

    def _of_product(self, p: Product) -> int | None:
        found = [(self._of_atom(a), e) for a, e in p]
        if any(parity is None or (parity == 1 and not e.is_integer()) for parity, e in found):
            return None
        signed = [(parity, e) for parity, e in found if parity != 2]
        return sum(int(e) for parity, e in signed if parity) % 2 if signed else 2

    def _find(self, atom: int) -> int | None:
        kind, operands, name = self.values.atoms[atom]
        parities = [self.of_sum(x) for x in operands]
        if kind in ("input", "fill"):
            return self.inputs.get(name) if kind == "input" else 2 if name == "0" else 0
        if kind in ("sign", "sum", "total"):
            return parities[0]
        if kind == "where":
            return _same(parities[:2])
        if kind == "minimum" and 2 in parities and (bounded := self._bounded(operands)):
            return self.of_sum(bounded)
        if kind in ("abs", "norm"):
            return 0 if parities[0] is not None else None
        return 0 if all(parity in (0, 2) for parity in parities) else None

    def _bounded(self, operands: tuple[Sum, ...]) -> Sum | None:
        """The value that is clamped from both sides by numbers; None if that is a number too."""
        for p in (p for x in operands if len(x) == 1 for p in x if len(p) == 1):
            ((atom, _),) = p
            kind, inner, _ = self.values.atoms[atom]
            if kind == "maximum" and any(self.of_sum(x) == 2 for x in inner):
                return next((x for x in inner if self.of_sum(x) != 2), None)
        return None


def _same(parities: Iterable[int | None]) -> int | None:
    """The common parity of all operands that are not numbers; None if they differ."""
    found = {p for p in parities if p != 2} or {2}
    return found.pop() if len(found) == 1 else None
