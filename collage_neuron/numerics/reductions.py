"""Reductions over the elements of a value, as operations of a graph: the sums and counts of a monitor."""

from __future__ import annotations

import torch

from collage_neuron.numerics.eft import Value, traceable


@traceable
def total(x: Value) -> Value:
    """The sum of all elements of an fp32 value; each backend says in which precision and order it adds."""
    return x.sum(dtype=torch.float64)


@traceable
def count(mask: Value) -> Value:
    """The number of elements for which a mask is true: exact."""
    return mask.sum()


REDUCTIONS = frozenset({total, count})
"""The reductions that an update may return in addition to its components."""
