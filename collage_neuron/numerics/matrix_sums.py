"""Reductions over the rows or the columns of matrices, whose bits do not depend on the backend or its threads.

A parameter with two or more dimensions counts as B matrices of R rows and C columns: its last two dimensions. What is
computed from it has an *extent*: a value for each element, each row (what is left of a mean over the last dimension),
each column, each matrix, or one number. A value that is not one of each element has three dimensions too, of which
those that it does not have are 1, and a number has none: so values of all extents broadcast.

Terms are the elements, or their squares, which fp64 holds exactly. They are added in fp64, in this order:

1. along each row, if elements of rows are: runs of 128 elements as `tensor_sums` adds them, which are folded (with
   zeros after the last, so that their number is a power of two, the second half is added to the first, until one is
   left);
2. down each column, if sums of columns are wanted: runs of 64 rows, one after another from 0, which are folded;
3. what is not one of each element is folded: sums of rows over rows, and then over matrices, and so are columns.

The sum is divided by the number of terms, or its root is taken, in fp64, and then it is rounded once. So a sum over a
row of n elements is within (18 + k) * 2**-53 of the sum of its terms' magnitudes before that, where 2**k is at least
n / 128; a sum over a column of n within (63 + k) * 2**-53, where 2**k is at least n / 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from collage_neuron.numerics.eft import Value, traceable
from collage_neuron.numerics.tensor_sums import RUN, Reduction, folded_over, run_sums, terms_of

ELEMENT, ROW, COLUMN, MATRIX, NUMBER = "element", "row", "column", "matrix", "number"

DIMENSIONS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        ELEMENT: frozenset({0, 1, 2}),
        ROW: frozenset({0, 1}),
        COLUMN: frozenset({0, 2}),
        MATRIX: frozenset({0}),
        NUMBER: frozenset(),
    }
)
"""The extents: for each the dimensions, of (matrices, rows, columns), along which its values differ."""

DOWN = 64
"""Rows that are added one after another."""


def extent_of(dimensions: Iterable[int]) -> str:
    """The extent of values that differ along these dimensions."""
    wanted = frozenset(dimensions)
    return next(name for name, own in DIMENSIONS.items() if own == wanted)


def joined(extents: Iterable[str]) -> str:
    """The extent of what is computed from values of these extents."""
    return extent_of(frozenset[int]().union(*(DIMENSIONS[e] for e in extents)))


def view_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """How many matrices, rows and columns a parameter has."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def shape_of(extent: str, view: Sequence[int]) -> tuple[int, ...]:
    """The shape of a value of an extent, for a parameter with so many matrices, rows and columns."""
    own = DIMENSIONS[extent]
    return tuple(n if d in own else 1 for d, n in enumerate(view)) if own else ()


def down_columns(terms: Tensor) -> Tensor:
    """The sums of runs of 64 rows of fp64 terms, one after another: for the terms of `R` rows, those of R / 64."""
    *others, rows, columns = terms.shape
    groups = -(-rows // DOWN)
    if not terms.numel():  # which torch does not pad
        return terms.new_zeros(*others, groups, columns)
    padded = torch.nn.functional.pad(terms, (0, 0, 0, groups * DOWN - rows)).reshape(*others, groups, DOWN, columns)
    sums = torch.zeros(*others, groups, columns, dtype=torch.float64, device=terms.device)  # so no sum is -0
    for i in range(DOWN):
        sums = sums + padded[..., i, :]
    return sums


def finished(reduction: Reduction, sums: Tensor, extent: str, count: int) -> Tensor:
    """The fp32 results of fp64 sums (matrices, rows, columns), of which those of `extent` are left.

    `count` is the number of terms of each result. Sums may have a dimension more, of parameters, which is kept.
    """
    left = DIMENSIONS[extent]
    # Columns, rows and then matrices, as the docstring of the file has it: another order has other bits.
    for d in (2, 1, 0):
        sums = sums if d in left else folded_over(sums, d - 3)
    results: Tensor = reduction.finish(sums, count).to(torch.float32)
    return results if left or results.dim() > 3 else results.reshape(())


def terms_in(view: Sequence[int], operand: str, extent: str) -> int:
    """How many values of the extent `operand` each result of `extent` is made of."""
    return math.prod(view[d] for d in DIMENSIONS[operand] - DIMENSIONS[extent])


def of_elements(function: Any, x: Tensor, extent: str) -> Tensor:
    """The result of an operation of `ENDINGS` for elements of shape (matrices, rows, columns)."""
    terms = terms_of(ENDINGS[function], x)
    runs = down_columns(terms) if extent == COLUMN else run_sums(terms)
    sums = folded_over(runs, 1 if extent == COLUMN else 2)
    return finished(ENDINGS[function], sums, extent, terms_in(x.shape, ELEMENT, extent))


def _of(function: Callable[[Value, str], Value], x: Value, extent: str) -> Any:
    gone = [n for d, n in enumerate(x.shape[-3:]) if d not in DIMENSIONS[extent]]
    ending = ENDINGS[function]
    return finished(ending, terms_of(ending, x), extent, math.prod(gone))


@traceable
def sum_to(x: Value, extent: str) -> Value:
    """The sums, one for each of `extent`, of values of rows, columns or matrices; of elements see `of_elements`."""
    return _of(sum_to, x, extent)


@traceable
def mean_to(x: Value, extent: str) -> Value:
    """The means, one for each of `extent`: sums are divided by their numbers of terms in double."""
    return _of(mean_to, x, extent)


@traceable
def norm_to(x: Value, extent: str) -> Value:
    """The Euclidean norms, one for each of `extent`: roots are taken in double."""
    return _of(norm_to, x, extent)


ENDINGS: Mapping[Any, Reduction] = {
    sum_to: Reduction(False, lambda total, n: total),
    mean_to: Reduction(False, lambda total, n: total / n),
    norm_to: Reduction(True, lambda total, n: total.sqrt()),
}
"""The operations of a graph that reduce a value to another extent."""
assert RUN == 128  # as above
