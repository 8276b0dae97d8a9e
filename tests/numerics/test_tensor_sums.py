"""Sums over a tensor: their order is that of a loop, their error within its bound, and neither depends on memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_neuron.numerics.tensor_sums import LANES, RUN, RUNS, mean_of, norm_of, sum_of

SIZES = (1, 7, 127, 128, 129, 1000, RUN * RUNS, RUN * RUNS + 1, 2 * RUN * RUNS + 300)
"""At most four times 64 runs."""


def folded(numbers: Sequence[float]) -> float:
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [x + y for x, y in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def by_loops(terms: Sequence[float]) -> float:
    """The definition, in Python's doubles."""
    runs = []
    for first in range(0, len(terms), RUN):
        lanes = [0.0] * LANES
        for i, x in enumerate(terms[first : first + RUN]):
            lanes[i % LANES] += x
        runs.append(folded(lanes))
    runs += [0.0] * (-len(runs) % RUNS)
    sums = [folded(runs[i : i + RUNS]) for i in range(0, len(runs), RUNS)]
    return folded([*sums, *[0.0] * (4 - len(sums))])


def values(size: int, seed: int = 0) -> Tensor:
    """Of both signs and many magnitudes, so that each order of additions has other bits."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=g) * torch.exp2(torch.randint(-30, 30, (size,), generator=g))


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())


@pytest.mark.parametrize("size", SIZES)
def test_the_order_is_that_of_the_definition(size: int) -> None:
    x = values(size)
    terms = x.double().tolist()
    assert float(sum_of(x)) == fp32(by_loops(terms))
    assert float(mean_of(x)) == fp32(by_loops(terms) / size)
    assert float(norm_of(x)) == fp32(math.sqrt(by_loops([t * t for t in terms])))


@pytest.mark.parametrize("size", [*SIZES[:6], SIZES[-1]])
def test_errors_are_within_the_bounds(size: int) -> None:
    x = values(size, 1)
    exact = sum(map(Fraction, x.tolist()), Fraction())
    magnitudes = sum((abs(Fraction(t)) for t in x.tolist()), Fraction())
    off = abs(Fraction(float(sum_of(x))) - exact)
    levels = 24 + (-(-size // (RUN * RUNS)) - 1).bit_length()
    assert off <= levels * magnitudes / 2**53 * Fraction(101, 100) + abs(exact) / 2**24
    squares = sum((Fraction(t) ** 2 for t in x.tolist()), Fraction())
    found = Fraction(float(norm_of(x)))
    unit = Fraction(1, 2**24) * (1 + Fraction(1, 2**24))
    assert squares * (1 - unit) ** 2 <= found**2 <= squares * (1 + unit) ** 2


@pytest.mark.parametrize("reduce", [sum_of, mean_of, norm_of])
def test_memory_order_does_not_matter(reduce: Callable[[Any], Tensor]) -> None:
    x = values(60 * 70).view(60, 70)
    same = torch.empty(70, 60).t().copy_(x)
    assert not same.is_contiguous()
    assert torch.equal(reduce(same), reduce(x))
    assert torch.equal(reduce(torch.stack([x, x])[1]), reduce(x))


def test_what_a_norm_of_squares_in_fp32_would_lose() -> None:
    for scale in (2.0**-149, 2.0**-80, 2.0**100):
        assert float(norm_of(torch.tensor([3.0, 4.0]) * scale)) == fp32(5.0 * scale)
    assert float(norm_of(torch.full((4,), 3e38))) == math.inf  # its norm is beyond fp32
    many = torch.full((1 << 22,), 1.0)
    many[0] = 2.0**24  # a sum in fp32 would stay there
    assert float(sum_of(many)) == 2.0**24 + (1 << 22)  # even, below 2**25


def test_what_is_not_finite() -> None:
    for reduce in (sum_of, mean_of, norm_of):
        assert math.isnan(float(reduce(torch.tensor([1.0, math.nan]))))
    assert float(sum_of(torch.tensor([1.0, math.inf]))) == math.inf
    assert math.isnan(float(sum_of(torch.tensor([math.inf] + [0.0] * (RUN * RUNS) + [-math.inf]))))
    assert float(norm_of(torch.tensor([1.0, -math.inf]))) == math.inf
    empty = torch.empty(0, 3)
    assert (float(sum_of(empty)), float(norm_of(empty))) == (0.0, 0.0)
    assert math.isnan(float(mean_of(empty)))
    assert math.copysign(1, float(sum_of(torch.tensor([-0.0])))) == 1


def test_sums_of_64_runs_are_folded_with_those_of_the_second_half() -> None:
    """Fp64 loses 1 beside 2**90: what is left of it tells which sums were added first."""
    x = torch.zeros(3 * RUN * RUNS)
    first, second, third = x.view(3, -1)[:, 5]
    for order, total in (((first, second, third), 0.0), ((first, third, second), 1.0)):
        for place, value in zip(order, (2.0**90, -(2.0**90), 1.0), strict=True):
            place.fill_(value)
        assert float(sum_of(x)) == total
