"""The operations that are reductions: sums, means and norms, over all dimensions of a tensor or some; and products."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

_REDUCTIONS = frozenset(
    {
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.mean.default,
        aten.mean.dim,
        aten.linalg_vector_norm.default,
    }
)
"""They make one number of all elements of a tensor, if they are not given some of its dimensions."""


def is_reduction(func: Any) -> bool:
    """Returns True for a sum, a mean or a norm."""
    return func in _REDUCTIONS


_OUTER = (aten.mm.default, aten.bmm.default)
"""Products of matrices; of a column and a row they are those of all pairs of elements."""


def is_outer(func: Any) -> bool:
    """Returns True for a product of matrices, of which that of a column and a row is understood."""
    return func in _OUTER
