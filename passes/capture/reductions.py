"""The operations that are reductions: sums, means and norms, over all dimensions of a tensor or some."""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.numerics.matrix_sums import mean_to, norm_to, sum_to

aten = torch.ops.aten

REDUCTIONS = {
    aten.sum.default: sum_to,
    aten.sum.dim_IntList: sum_to,
    aten.mean.default: mean_to,
    aten.mean.dim: mean_to,
    aten.linalg_vector_norm.default: norm_to,
}
"""What they are over rows or columns; they make one number of a tensor if they are given none of its dimensions."""


def is_reduction(func: Any) -> bool:
    """Returns True for a sum, a mean or a norm."""
    return func in REDUCTIONS
