"""Reductions over the elements of a value, as operations of a graph: the sums and counts of a monitor."""

from __future__ import annotations

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from collage_neuron.numerics.eft import Value


def total(x: Value) -> Value:
    """The sum of all elements of an fp32 value; each backend says in which precision and order it adds."""
    if has_torch_function_unary(x):
        return handle_torch_function(total, (x,), x)
    return x.sum(dtype=torch.float64)


def count(mask: Value) -> Value:
    """The number of elements for which a mask is true: exact."""
    if has_torch_function_unary(mask):
        return handle_torch_function(count, (mask,), mask)
    return mask.sum()


REDUCTIONS = frozenset({total, count})
"""The reductions that an update may return in addition to its components."""
