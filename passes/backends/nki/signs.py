"""Proofs that a value is not negative, from what the host checks of the numbers of a step."""

from __future__ import annotations

import operator

from collage_neuron.passes.backends.nki.ir import Column, Operand, Spread, Tile, Value, View
from collage_neuron.passes.backends.nki.operations import MASKS, POWERS


def nonnegative(x: Operand) -> frozenset[int] | None:
    """The entries of the scalar vector whose non-negativity proves that of x; None if there is no proof."""
    if isinstance(x, Column):
        plain = x.target is None or (x.target is operator.truediv and x.args[0] == 1.0)
        return x.entries() if plain and not x.is_found else None  # the host does not see what stages find
    if isinstance(x, View):
        return None
    if isinstance(x, Spread):
        return nonnegative(x.tile)
    if not isinstance(x, Value):
        return frozenset() if x >= 0 else None
    if x.op in ("sqrt", "exp", "abs", "reciprocal", "block_max", *POWERS.values()) or x.op in MASKS:
        return frozenset()
    proofs = [nonnegative(a) for a in _unpaired(x)]
    if x.op == "maximum":
        return next((p for p in proofs if p is not None), None)
    if x.op not in ("add", "multiply", "minimum", "clamp", "copy", "own_copy", "fill", "select") or None in proofs:
        return None
    return frozenset().union(*(p for p in proofs if p is not None))


def _unpaired(x: Value) -> list[Operand]:
    """The operands of `x`; for a product, its factors without pairs of equal ones: of (g * c) * g only c."""
    if x.op != "multiply":
        return list(x.args)
    left: list[Operand] = []
    for factor in (f for a in x.args for f in (_unpaired(a) if _is_product(a) else [a])):  # type: ignore[arg-type]
        pair = next((i for i, f in enumerate(left) if _same(f, factor)), None)
        left = [*left, factor] if pair is None else [*left[:pair], *left[pair + 1 :]]
    return left


def _same(x: Operand, y: Operand) -> bool:
    """Returns True for the same tile, the same number of the step, and the same number (0.0 is not -0.0)."""
    return x is y or (not isinstance(x, Tile) and repr(x) == repr(y))


def _is_product(x: Operand) -> bool:
    return isinstance(x, Value) and x.op == "multiply"
