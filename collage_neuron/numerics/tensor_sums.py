"""Reductions over all elements of a tensor, whose bits do not depend on the backend, its vectors or its threads.

Terms are the elements, or their squares, which fp64 holds exactly. They are added in fp64, in this order:

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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.eft import Value, traceable

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


def finished(reduction: Reduction, groups: Sequence[Tensor], sizes: Sequence[int]) -> list[float]:
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


def _of(function: Callable[[Value], Value], x: Value) -> Any:
    reduction, elements = OF_TENSOR[function], x.reshape(-1)
    (value,) = finished(reduction, [groups_of(reduction, elements)], [elements.numel()])
    return torch.tensor(value, dtype=torch.float64, device=x.device).to(torch.float32)  # the only rounding to fp32


@traceable
def sum_of(x: Value) -> Value:
    """The sum of all elements of an fp32 value, as an fp32 number."""
    return _of(sum_of, x)


@traceable
def mean_of(x: Value) -> Value:
    """The mean of all elements: the sum is divided by their number in double."""
    return _of(mean_of, x)


@traceable
def norm_of(x: Value) -> Value:
    """The Euclidean norm of all elements: the root is taken in double."""
    return _of(norm_of, x)


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
