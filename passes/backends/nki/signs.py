"""Proofs that a value is not negative, from what the host checks of the numbers of a step."""

from __future__ import annotations

import operator

from collage_neuron.passes.backends.nki.ir import Column, Operand, Spread, Value, View
from collage_neuron.passes.backends.nki.operations import MASKS, POWERS


def nonnegative(x: Operand) -> frozenset[int] | None:
    """The entries of the scalar vector whose non-negativity proves that of x; None if there is no proof."""
    if isinstance(x, Column):
        plain = x.target is None or (x.target is operator.truediv and x.args[0] == 1.0)
        return x.entries() if plain else None
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
    """The operands of `x`; for a product, its factors without pairs of the same tile: of (g * c) * g only c."""
    if x.op != "multiply":
        return list(x.args)
    left: list[Operand] = []
    for factor in (f for a in x.args for f in (_unpaired(a) if _is_product(a) else [a])):  # type: ignore[arg-type]
        same = [f for f in left if f is factor and isinstance(f, Value)]
        left = [f for f in left if f is not factor] if same else [*left, factor]
    return left


def _is_product(x: Operand) -> bool:
    return isinstance(x, Value) and x.op == "multiply"
