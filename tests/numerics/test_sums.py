"""Sums over a tensor, and over rows and columns: their order is that of loops, and their errors are within the bounds.

What is added does not depend on the order in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_neuron.numerics.reductions import (
    COLUMN,
    DOWN,
    LANES,
    MATRIX,
    NUMBER,
    ROW,
    RUN,
    RUNS,
    mean_of,
    mean_to,
    norm_of,
    norm_to,
    of_elements,
    shape_of,
    sum_of,
    sum_to,
)

SIZES = (1, 7, 127, 128, 129, 1000, RUN * RUNS, RUN * RUNS + 1, 2 * RUN * RUNS + 300)
"""At most four times 64 runs."""
VIEWS = ((1, 3, 5), (1, 64, 128), (1, 65, 129), (1, 200, 1), (1, 1, 300), (3, 70, 40), (2, 130, 600))


def folded(numbers: Sequence[float]) -> float:
    numbers = [*numbers, *[0.0] * ((1 << (max(len(numbers), 1) - 1).bit_length()) - len(numbers))]
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [x + y for x, y in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def runs_of(row: Sequence[float]) -> list[float]:
    runs = []
    for first in range(0, len(row), RUN):
        lanes = [0.0] * LANES
        for i, x in enumerate(row[first : first + RUN]):
            lanes[i % LANES] += x
        runs.append(folded(lanes))
    return runs


def down(column: Sequence[float]) -> float:
    runs = []
    for first in range(0, len(column), DOWN):
        total = 0.0
        for x in column[first : first + DOWN]:
            total += x
        runs.append(total)
    return folded(runs)


def of_tensor(terms: Sequence[float]) -> float:
    """The definition, in Python's doubles."""
    runs = runs_of(terms)
    runs += [0.0] * (-len(runs) % RUNS)
    return folded([folded(runs[i : i + RUNS]) for i in range(0, len(runs), RUNS)])


def by_rows_and_columns(terms: Tensor, extent: str) -> list[float]:
    """The definition, in Python's doubles: for each of `extent` the sum."""
    rows = [[folded(runs_of(row)) for row in matrix] for matrix in terms.tolist()]
    each = {
        ROW: [x for matrix in rows for x in matrix],
        COLUMN: [down(column) for matrix in terms.mT.tolist() for column in matrix],
        MATRIX: [folded(matrix) for matrix in rows],
        NUMBER: [folded([folded(matrix) for matrix in rows])],
    }
    return each[extent]


def values(*shape: int, seed: int = 0) -> Tensor:
    """Of both signs and many magnitudes, so that each order of additions has other bits."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(torch.randint(-40, 40, shape, generator=g))


def fp32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float())


# --- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_the_order_over_a_tensor_is_that_of_the_definition(size: int) -> None:
    x = values(size)
    terms = x.double().tolist()
    assert float(sum_of(x)) == fp32(of_tensor(terms))
    assert float(mean_of(x)) == fp32(of_tensor(terms) / size)
    assert float(norm_of(x)) == fp32(math.sqrt(of_tensor([t * t for t in terms])))


@pytest.mark.parametrize("size", [*SIZES[:6], SIZES[-1]])
def test_errors_over_a_tensor_are_within_the_bounds(size: int) -> None:
    x = values(size, seed=1)
    exact = sum(map(Fraction, x.tolist()), Fraction())
    magnitudes = sum((abs(Fraction(t)) for t in x.tolist()), Fraction())
    off = abs(Fraction(float(sum_of(x))) - exact)
    levels = 24 + (-(-size // (RUN * RUNS)) - 1).bit_length()
    assert off <= levels * magnitudes / 2**53 * Fraction(101, 100) + abs(exact) / 2**24
    squares = sum((Fraction(t) ** 2 for t in x.tolist()), Fraction())
    found = Fraction(float(norm_of(x)))
    unit = Fraction(1, 2**24) * (1 + Fraction(1, 2**24))
    assert squares * (1 - unit) ** 2 <= found**2 <= squares * (1 + unit) ** 2


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


# --- rows and columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("extent", [ROW, COLUMN, MATRIX, NUMBER])
def test_the_order_is_that_of_the_definition(view: tuple[int, int, int], extent: str) -> None:
    x = values(*view)
    count = x.numel() // max(math.prod(shape_of(extent, view)), 1)
    sums = by_rows_and_columns(x.double(), extent)
    wanted: dict[Any, Sequence[float]] = {
        sum_to: sums,
        mean_to: [s / count for s in sums],
        norm_to: [math.sqrt(s) for s in by_rows_and_columns(x.double() ** 2, extent)],
    }
    for function, numbers in wanted.items():
        found = of_elements(function, x, extent)
        assert found.shape == shape_of(extent, view)
        assert torch.equal(found.reshape(-1), torch.tensor(numbers, dtype=torch.float64).float())


@pytest.mark.parametrize("view", VIEWS[:4])
@pytest.mark.parametrize("extent", [ROW, COLUMN])
def test_errors_are_within_the_bounds(view: tuple[int, int, int], extent: str) -> None:
    x = values(*view, seed=1)
    found = of_elements(sum_to, x, extent).reshape(-1).tolist()
    lines = (x if extent == ROW else x.mT).reshape(-1, view[2] if extent == ROW else view[1]).tolist()
    run, own = (RUN, 18) if extent == ROW else (DOWN, 63)
    for number, line in zip(found, lines, strict=True):
        exact = sum(map(Fraction, line), Fraction())
        size = sum((abs(Fraction(t)) for t in line), Fraction())
        k = math.ceil(math.log2(-(-len(line) // run)))
        assert abs(Fraction(number) - exact) <= (own + k) * size / 2**53 * Fraction(101, 100) + abs(exact) / 2**24


@pytest.mark.parametrize("function", [sum_to, mean_to, norm_to])
def test_values_of_rows_and_columns_are_reduced_too(function: Callable[..., Tensor]) -> None:
    rows, columns = values(2, 70, 1), values(1, 1, 50)
    for x, extent in ((rows, MATRIX), (rows, NUMBER), (columns, MATRIX), (columns, NUMBER)):
        exact = x.double() if extent == NUMBER else x.double().reshape(x.shape[0], -1)
        over = None if extent == NUMBER else 1
        wanted = {sum_to: exact.sum(over), mean_to: exact.mean(over), norm_to: exact.norm(dim=over)}[function]
        found = function(x, extent)
        assert found.shape == ((x.shape[0], 1, 1) if extent == MATRIX else ())
        size = exact.abs().sum(over)
        assert ((found.reshape(wanted.shape) - wanted).abs() <= 2**-23 * wanted.abs() + 2**-46 * size).all()


def test_memory_order_does_not_matter() -> None:
    x = values(3, 70, 130)
    same = torch.empty(130, 70, 3).permute(2, 1, 0).copy_(x)
    for reduce in (sum_of, mean_of, norm_of):
        assert torch.equal(reduce(same), reduce(x))
        assert torch.equal(reduce(torch.stack([x, x])[1]), reduce(x))
    for extent in (ROW, COLUMN, NUMBER):
        assert torch.equal(of_elements(sum_to, same, extent), of_elements(sum_to, x, extent))


def test_nothing_is_added_of_nothing() -> None:
    for view in ((1, 0, 4), (1, 4, 0), (0, 3, 4)):
        for extent in (ROW, COLUMN, MATRIX, NUMBER):
            x = torch.zeros(view)
            assert of_elements(sum_to, x, extent).shape == shape_of(extent, view)
            assert not of_elements(sum_to, x, extent).any()
            assert of_elements(mean_to, x, extent).isnan().all()


def test_numbers_that_are_none_stay_in_their_row() -> None:
    x = torch.ones(1, 4, 40)
    x[0, 1, 3], x[0, 2, 0], x[0, 2, 1], x[0, 3, 2] = math.nan, math.inf, -math.inf, math.inf
    rows = of_elements(sum_to, x, ROW).reshape(-1)
    assert rows[0] == 40
    assert rows[1:3].isnan().all()
    assert rows[3] == math.inf
    assert of_elements(sum_to, x, COLUMN).isfinite().sum() == 36
