"""Puts the sums of a tensor together from what the kernel of a reduction leaves of each chunk (`chunk_sums.py`).

All are multiplied by powers of two, so that they are in units of the largest chunk, and folded in pairs of fp32
(`fp32_pairs.py`); the largest unit comes back last, so that squares neither overflow nor underflow. What is neither
finite nor NaN comes from the first totals: an infinite one is the sum.

The error, before a result is rounded to fp32: of a sum 2**-37 of the sum of magnitudes, of a norm 2**-36 of itself.
From 512 terms that have lost 2**-46 each, where the largest is 2 at least; from as many squares that have lost 2**-43,
where the largest is 4; and 2**-38 from folding 2**22 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collage_neuron.numerics.fp32_pairs import Pair, folded, over, root
from collage_neuron.numerics.tensor_sums import OF_TENSOR, mean_of, norm_of, sum_of
from collage_neuron.passes.backends.nki.ir import Pieces, Program

FINISH: Mapping[Any, Callable[[Pair, int], Pair]] = {
    sum_of: lambda total, n: total,
    mean_of: over,
    norm_of: lambda total, n: root(total),
}
"""What becomes of a sum, by operation."""


def sums_of(program: Program, kinds: Sequence[Any], totals: Tensor, size: int) -> Tensor:
    """The results of a reduction for parameters of so many elements: fp32, `[parameters, results]`.

    `totals` has, for each of them, the measures of each chunk: `[parameters, chunks * measures]`.
    """
    each = totals.view(len(totals), -1, len(program.measures))
    found = [_finished(pieces, kind, each, size) for pieces, kind in zip(program.sums, kinds, strict=True)]
    return torch.stack(found, dim=1)


def _finished(pieces: Pieces, kind: Any, measures: Tensor, size: int) -> Tensor:
    terms, unit = terms_of(pieces, measures, OF_TENSOR[kind].is_square)
    found = FINISH[kind](folded(terms.flatten(1)), size).hi
    plain = terms[:, 0].sum(1)
    return torch.where(plain.abs() < torch.inf, found, plain) * unit


def terms_of(pieces: Pieces, measures: Tensor, is_square: bool) -> tuple[Tensor, Tensor]:
    """The terms of sums, `[parameters, totals, chunks]`, and the unit of each (for squares: of its root)."""
    units, inverse = measures[:, :, pieces.unit], measures[:, :, pieces.inverse]
    share = units * (0.5 * inverse.amin(1, keepdim=True))  # of the largest one: a power of two, at most 1
    share = share * share if is_square else share
    terms = torch.stack([measures[:, :, k] * factor for k, factor in pieces.totals], dim=1) * share[:, None]
    return terms, 0.5 * units.amax(1)


def nothing_of(kind: Any) -> float:
    """The result for a tensor without elements."""
    return OF_TENSOR[kind].finish(0.0, 0)
