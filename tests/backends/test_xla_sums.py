"""Sums over tensors, rows and columns as HLO have the bits of their definition, whatever the numbers are.

One program has all sizes, and is run on numbers that tell one order of additions from another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from collage_neuron.numerics.reductions import (
    COLUMN,
    MATRIX,
    NUMBER,
    ROW,
    RUN,
    mean_of,
    mean_to,
    norm_of,
    norm_to,
    of_elements,
    sum_of,
    sum_to,
)
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape
from collage_neuron.passes.backends.xla.lower import user_computation
from collage_neuron.passes.backends.xla.sums import Adder

torch_xla = pytest.importorskip("torch_xla")

SIZES = (0, 1, 127, 129, 8191, 8192, 8193, 20000, 70001)
VIEWS = ((2, 5, 129), (1, 130, 7), (3, 1, 1), (1, 0, 5), (2, 3, 0))
EXTENTS = (ROW, COLUMN, MATRIX, NUMBER)

Write = Callable[[Adder, Instruction], list[Instruction]]
Call = Callable[[Sequence[Tensor]], list[Tensor]]


def program(shapes: Sequence[tuple[int, ...]], write: Write, device: torch.device) -> Call:
    """What `write` makes of tensors of these shapes, as one program."""
    hlo = Computation("sums")
    adder = Adder(hlo, hlo.parameter(Shape("f32", (1,))))
    results = [result for shape in shapes for result in write(adder, hlo.parameter(Shape("f32", shape)))]
    call, zero = user_computation(hlo.module(results)), torch.zeros(1).to(device)

    def run(xs: Sequence[Tensor]) -> list[Tensor]:
        found = call([zero, *(x.to(device) for x in xs)], 0)
        torch_xla.sync()
        return [x.cpu() for x in found]

    return run


LARGE = {3: 2.0**90, 43: -(2.0**90), 5 * RUN + 1: 2.0**90, 37 * RUN + 1: -(2.0**90)}
"""By their places: two in one lane of the first run of 128 elements, two in runs that are added to one another."""


def hiding(*shape: int) -> Tensor:
    """Random numbers, and pairs of large ones, which hide in fp64 what is added to one of them before the other."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).reshape(-1)
    for place, value in LARGE.items():
        x[place : place + 1] = value
    return x.view(shape)


def with_nan(*shape: int) -> Tensor:
    return hiding(*shape).masked_fill(torch.arange(math.prod(shape)).view(shape) == 100, math.nan)


def infinite(*shape: int) -> Tensor:
    return hiding(*shape).masked_fill(torch.arange(math.prod(shape)).view(shape) % 8190 == 0, math.inf)


def negative_zeros(*shape: int) -> Tensor:
    return torch.full(shape, -0.0)


def extreme(*shape: int) -> Tensor:
    """Magnitudes of which squares in fp32 would overflow or vanish."""
    g = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=g) * torch.exp2(torch.randint(-120, 120, shape, generator=g))


GIVEN = (hiding, with_nan, infinite, negative_zeros, extreme)


def same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Returns True for the same bits; any NaN is as good as another."""
    return all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7.0, 3e38, -3e38), y.nan_to_num(7.0, 3e38, -3e38))
        and torch.equal(x.signbit() | x.isnan(), y.signbit() | y.isnan())
        for x, y in zip(found, wanted, strict=True)
    )  # fmt: skip


def of_tensors(adder: Adder, x: Instruction) -> list[Instruction]:
    return [adder.whole(operation, x) for operation in (sum_of, mean_of, norm_of)]


def by_definition(x: Tensor) -> list[Tensor]:
    return [sum_of(x), mean_of(x), norm_of(x)]


def test_sums_of_tensors_have_the_bits_of_the_definition(xla: torch.device) -> None:
    call = program([(n,) for n in SIZES], of_tensors, xla)
    for make in GIVEN:
        xs = [make(n) for n in SIZES]
        assert same(call(xs), [y for x in xs for y in by_definition(x)]), make.__name__


def of_rows(adder: Adder, x: Instruction) -> list[Instruction]:
    """Each operation once over elements, and once over what is left of them in rows."""
    found = [adder.of_elements(o, x, e) for o, e in zip((sum_to, mean_to, norm_to, sum_to), EXTENTS, strict=True)]
    return [*found, adder.of_sums(mean_to, found[0], MATRIX), adder.of_sums(norm_to, found[1], NUMBER)]


def rows_by_definition(x: Tensor) -> list[Tensor]:
    found = [of_elements(o, x, e) for o, e in zip((sum_to, mean_to, norm_to, sum_to), EXTENTS, strict=True)]
    operations: tuple[Any, Any] = mean_to, norm_to
    return [*found, operations[0](found[0], MATRIX), operations[1](found[1], NUMBER)]


def test_sums_of_rows_and_columns_have_the_bits_of_the_definition(xla: torch.device) -> None:
    call = program(VIEWS, of_rows, xla)
    for make in GIVEN:
        xs = [make(*view) for view in VIEWS]
        assert same(call(xs), [y for x in xs for y in rows_by_definition(x)]), make.__name__
