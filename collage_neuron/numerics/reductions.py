"""Reductions, whose bits do not depend on the backend, its vectors or its threads; and the sums of a monitor.

**Over all elements of a tensor.** Terms are the elements, or their squares, which fp64 holds exactly. They are added in
fp64, in this order:

1. runs of 128 elements, in row-major order, with zeros after the last: element i is added to lane i % 8, one after
   another, and the lanes are folded: the second half is added to the first, until one is left;
2. 64 runs are folded in the same way, with zeros after the last;
3. these sums are folded too, with zeros after the last, so that their number is a power of two;
Each is an addition of two fp64 numbers, which a program for a device can do as well as the host. So a sum of n elements
is within (24 + k) * 2**-53 of the sum of its terms' magnitudes before it is rounded to fp32, where 2**k is at least
n / 8192, and a norm within 2**-24 * (1 + 2**-24) of the exact one after that. A norm has neither overflow nor underflow
of its squares. Of NaN, and of infinities of both signs, the sum is NaN. The norm and the sum of no elements are 0,
their mean is NaN. No sum is -0.

Of a tensor in shards (DTensor), each process does all this with its own part. What DTensor adds up between processes, a
number of each, is gathered and folded in fp64 in the order of the processes, and rounded to fp32 (`across`).

**Over the rows or the columns of matrices.** A parameter with two or more dimensions counts as B matrices of R rows and
C columns: its last two dimensions. What is computed from it has an *extent*: a value for each element, each row (what
is left of a mean over the last dimension), each column, each matrix, or one number. A value that is not one of each
element has three dimensions too, of which those that it does not have are 1, and a number has none: so values of all
extents broadcast.

Terms are added in fp64, in this order:

1. along each row, if elements of rows are: runs of 128 elements as above, which are folded;
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


LANES, RUN, RUNS = 8, 128, 64
"""Lanes of a run, elements of a run, and runs that are folded."""


class Reduction(NamedTuple):
    """What is added, and what becomes of the sum."""

    is_square: bool
    """True if the terms are squares of the elements."""
    finish: Callable[[Any, int], Any]
    """The result in double of the sum, or in fp64 of a tensor of sums, and of the number of terms."""


def terms_of(reduction: Reduction, x: Tensor) -> Tensor:
    """What is added, in fp64."""
    terms = x.to(torch.float64)
    return terms * terms if reduction.is_square else terms


def run_sums(terms: Tensor) -> Tensor:
    """The sums of the runs of fp64 terms along the last dimension."""
    *others, size = terms.shape
    count = -(-size // RUN)
    if not terms.numel():  # which torch does not pad
        return terms.new_zeros(*others, count)
    rows = torch.nn.functional.pad(terms, (0, count * RUN - size)).reshape(*others, count, RUN // LANES, LANES)
    # From 0, not from the first row: so no sum is -0.
    lanes = torch.zeros(*others, count, LANES, dtype=torch.float64, device=terms.device)
    for i in range(RUN // LANES):
        lanes = lanes + rows[..., i, :]
    return folded_over(lanes, -1)[..., 0]


def groups_of(reduction: Reduction, x: Tensor) -> Tensor:
    """The sums of groups of 64 runs of 1-D fp32 elements: 1-D fp64."""
    runs = run_sums(terms_of(reduction, x))
    padded = torch.nn.functional.pad(runs, (0, groups_in(x.numel()) * RUNS - len(runs)))
    return folded_over(padded.view(-1, RUNS), -1)[..., 0]


def groups_in(size: int) -> int:
    """How many groups of runs so many elements have."""
    return -(-size // (RUN * RUNS))


def folded_over(x: Tensor, dim: int) -> Tensor:
    """The sums over a dimension, which is one element long then: the second half is added to the first, and so on."""
    count = x.shape[dim]
    if not count:
        return x.sum(dim, keepdim=True)
    if missing := power_from(count) - count:
        shape = [*x.shape]
        shape[dim] = missing
        x = torch.cat([x, x.new_zeros(shape)], dim)
    while (half := x.shape[dim] // 2) > 0:
        x = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
    return x


def finish_each(reduction: Reduction, groups: Sequence[Tensor], sizes: Sequence[int]) -> list[float]:
    """The results in double, for tensors with these sums of groups and numbers of elements."""
    return [reduction.finish(total, size) for total, size in zip(totals(groups), sizes, strict=True)]


def totals(groups: Sequence[Tensor]) -> list[float]:
    """The sums of all terms in double, for tensors with these sums of groups: those of as many at once."""
    counts = [*map(len, groups)]
    results = [0.0] * len(groups)
    # Those of one size together: `tolist` waits for the device once for each.
    for count in {*counts} - {0}:
        places = [i for i, n in enumerate(counts) if n == count]
        sums = folded_over(torch.stack([groups[i] for i in places]), -1)[..., 0]
        for i, total in zip(places, sums.tolist(), strict=True):
            results[i] = total
    return results


def power_from(count: int) -> int:
    """The least power of two that is at least `count`, which is not 0."""
    return 1 << (count - 1).bit_length()


def _of_tensor(function: Callable[[Value], Value], x: Value) -> Any:
    reduction, elements = OF_TENSOR[function], x.reshape(-1)
    (value,) = finish_each(reduction, [groups_of(reduction, elements)], [elements.numel()])
    return torch.tensor(value, dtype=torch.float64, device=x.device).to(torch.float32)  # the only rounding to fp32


@traceable
def sum_of(x: Value) -> Value:
    """The sum of all elements of an fp32 value, as an fp32 number."""
    return _of_tensor(sum_of, x)


@traceable
def mean_of(x: Value) -> Value:
    """The mean of all elements: the sum is divided by their number in double."""
    return _of_tensor(mean_of, x)


@traceable
def norm_of(x: Value) -> Value:
    """The Euclidean norm of all elements: the root is taken in double."""
    return _of_tensor(norm_of, x)


@traceable
def across(x: Value, how: str, group: str) -> Value:
    """A number of which each process of a group has one, made that of all (`gathered`); of one process, x itself."""
    return x


def gathered(rows: Tensor, how: str) -> Tensor:
    """The fp32 numbers of processes, a row each, as those of all: `how` is a key of `ACROSS`."""
    return ACROSS[how](rows.to(torch.float64)).to(torch.float32)


def _added(rows: Tensor) -> Tensor:
    return folded_over(rows, 0)[0]


ACROSS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": _added,
    "avg": lambda rows: _added(rows) / len(rows),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}
"""What becomes of numbers that processes have gathered."""

OF_TENSOR: Mapping[Any, Reduction] = {
    sum_of: Reduction(False, lambda total, n: total),
    mean_of: Reduction(False, lambda total, n: total / n if n else math.nan),
    norm_of: Reduction(True, lambda total, n: math.sqrt(total)),
}
"""The operations of a graph that reduce a value to one number."""


# --- rows, columns and matrices ---------------------------------------------------------------------------------------


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


def _of_extent(function: Callable[[Value, str], Value], x: Value, extent: str) -> Any:
    gone = [n for d, n in enumerate(x.shape[-3:]) if d not in DIMENSIONS[extent]]
    ending = ENDINGS[function]
    return finished(ending, terms_of(ending, x), extent, math.prod(gone))


@traceable
def sum_to(x: Value, extent: str) -> Value:
    """The sums, one for each of `extent`, of values of rows, columns or matrices; of elements see `of_elements`."""
    return _of_extent(sum_to, x, extent)


@traceable
def mean_to(x: Value, extent: str) -> Value:
    """The means, one for each of `extent`: sums are divided by their numbers of terms in double."""
    return _of_extent(mean_to, x, extent)


@traceable
def norm_to(x: Value, extent: str) -> Value:
    """The Euclidean norms, one for each of `extent`: roots are taken in double."""
    return _of_extent(norm_to, x, extent)


ENDINGS: Mapping[Any, Reduction] = {
    sum_to: Reduction(False, lambda total, n: total),
    mean_to: Reduction(False, lambda total, n: total / n),
    norm_to: Reduction(True, lambda total, n: total.sqrt()),
}
"""The operations of a graph that reduce a value to another extent."""
