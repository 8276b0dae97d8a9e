"""Sums, means and norms by kernels, of tensors and of rows, columns and matrices: beside exact ones and those of fp64.

Evidence level: stand-in and independent interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from nki_runs import INFINITY, bits, count_of, run, search_less
from second_reader import results
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from collage_neuron.numerics.eft import widen
from collage_neuron.numerics.fp32_pairs import folded
from collage_neuron.numerics.reductions import (
    COLUMN,
    DIMENSIONS,
    MATRIX,
    NUMBER,
    ROW,
    mean_of,
    mean_to,
    norm_of,
    norm_to,
    of_elements,
    sum_of,
    sum_to,
)
from collage_neuron.passes.backends.nki import calls
from collage_neuron.passes.backends.nki.chunk_totals import Wanted, of_values, sums_for, sums_of, terms_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

DIALECTS = ("nki", "beta1")
KINDS = (sum_of, mean_of, norm_of)
NOTHING = torch.zeros(0)


@cache
def kernel(dialect: str, storage: str = "fp32") -> Kernel:
    """Sum, mean and norm of x, in one reduction."""
    graph = fx.Graph()
    x: Any = widen(fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph)))
    graph.output(tuple(kind(x).node for kind in KINDS))
    stage = Stage(REDUCTION, graph, ("x",), (), tuple(kind.__name__ for kind in KINDS))
    update = Update((stage,), ("x",), (), ScalarProgram(), {})
    with pytest.MonkeyPatch.context() as patch:
        search_less(patch)
        return lower_to_nki(update, "trn1", dialect, components={"x": storage})


def measured(k: Kernel, x: Tensor, cut: Cut | None = None, **others: Any) -> Tensor:
    return run(k, {"x": x}, NOTHING, cut=cut, **others).results["measures"]


def numbers(k: Kernel, x: Tensor, cut: Cut | None = None, **others: Any) -> Tensor:
    return sums_of(k.plan.program, KINDS, measured(k, x, cut, **others)[None], x.numel())[0]


def defined(x: Tensor) -> Tensor:
    """As fp64 gives them."""
    return torch.stack([kind(x.float()) for kind in KINDS])


def values(shape: int | tuple[int, ...], spread: int = 12, seed: int = 0) -> Tensor:
    """Of both signs and of many magnitudes."""
    shape = (shape,) if isinstance(shape, int) else shape
    g = torch.Generator().manual_seed(1000 * math.prod(shape) + seed)
    return torch.randn(shape, generator=g) * torch.randint(-spread, spread + 1, shape, generator=g).float().exp2()


def check(kind: Any, found: Tensor, of: Sequence[Sequence[Fraction]]) -> None:
    """What `chunk_totals.py` says: 2**-37 of the sum of magnitudes, 2**-36 of a norm, and one rounding to fp32."""
    unit, off = Fraction(1, 1 << 24), Fraction(1, 1 << 24) * (1 + Fraction(1, 1 << 12))
    for got, terms in zip(map(Fraction, found.flatten().tolist()), of, strict=True):
        n = len(terms) if kind in (mean_of, mean_to) else 1
        if kind in (norm_of, norm_to):
            square = sum((v * v for v in terms), Fraction())
            assert square * (1 - off) ** 2 <= got * got <= square * (1 + off) ** 2
        else:
            total, size = sum(terms, Fraction()) / n, sum(map(abs, terms), Fraction()) / n
            assert abs(got - total) <= unit * abs(total) + Fraction(1, 1 << 37) * size


def check_all(found: Tensor, x: Tensor) -> None:
    for kind, got in zip(KINDS, found, strict=True):
        check(kind, got, [[Fraction(v) for v in x.tolist()]])


def same(found: Tensor, right: Tensor) -> bool:
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(
        bits(found[~found.isnan()]), bits(right[~right.isnan()])
    )


CUTS = ((1, None), (3, Cut(3, 3)), (127, None), (300, None), (128 * 6 * 2 + 131, Cut(6, 3)), (1100, Cut(1024, 512)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_results_are_within_their_bounds_and_almost_always_those_of_fp64(dialect: str) -> None:
    for n, cut in CUTS:
        for spread in (0, 50):
            x = values(n, spread)
            found = numbers(kernel(dialect), x, cut)
            check_all(found, x)
            assert torch.equal(found, defined(x))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_order_of_additions_does_not_matter(dialect: str) -> None:
    """Nor does who reads the kernel: sums of chunks are exact, also where all elements are as large as they can be."""
    k, x = kernel(dialect), torch.cat([values(128 * 512), 2 - torch.rand(128 * 512) * 2**-7])
    cut = Cut(512, 512)
    found = [measured(k, x, cut, device=replace(INFINITY, order=order)) for order in ("forward", "backward", "pairs")]
    if dialect == "beta1":
        found.append(results(k, {"x": x}, NOTHING, cut)["measures"])
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found[1:])
    assert torch.equal(sums_of(k.plan.program, KINDS, found[0][None], x.numel())[0], defined(x))


def lost(k: Kernel, x: Tensor, cut: Cut | None = None, is_square: bool = True, **others: Any) -> Fraction:
    """The relative error of the sum of squares, or of positive elements, before it is rounded to fp32."""
    found = measured(k, x, cut, **others).view(1, -1, len(k.plan.program.measures))
    terms, unit = terms_of(k.plan.program.sums[2 if is_square else 0], found, is_square)
    hi, lo = (Fraction(float(v)) for v in folded(terms.flatten(1)))
    power = 2 if is_square else 1
    right = sum(Fraction(v) ** power for v in x.tolist())
    return abs((hi + lo) * Fraction(float(unit)) ** power / right - 1)


def test_what_is_lost_of_small_elements_beside_a_large_one() -> None:
    """The worst for a chunk: 511 elements whose squares all lose as much, and to the same side."""
    for low in (2**-12 + 2**-23, 2**-10 + 3 * 2**-22, 0.3):
        x = torch.cat([torch.ones(1), torch.tensor(2.0**-9 * (1 + low)).expand(511)])
        assert lost(kernel("nki"), x, Cut(512, 512)) <= Fraction(2) ** -36
        assert lost(kernel("nki"), x * x, Cut(512, 512), is_square=False) <= Fraction(2) ** -37


EXTREMES: Mapping[str, Tensor] = {
    "zeros": torch.zeros(300),
    "minus zeros": -torch.zeros(5),
    "what cancels": torch.tensor([3e38, 3e38, -3e38, 1.0]),
    "too large": torch.tensor([3e38, 3e38]),
    "subnormal": torch.full((300,), 3e-45),
    "large and subnormal": torch.tensor([3e-45, 1e38]),
    "infinite": torch.tensor([1.0, torch.inf, 2.0]),
    "minus infinity": torch.cat([torch.ones(600), torch.tensor([-torch.inf]), torch.zeros(600)]),
    "both": torch.cat([torch.ones(600), torch.tensor([-torch.inf, torch.inf])]),
    "nan": torch.cat([torch.full((600,), torch.inf), torch.tensor([torch.nan])]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str, dialect: str) -> None:
    x = EXTREMES[name]
    assert same(numbers(kernel(dialect), x, Cut(1, 1) if len(x) < 600 else Cut(4, 2)), defined(x))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bf16_elements(dialect: str) -> None:
    """Their squares are exact: fewer instructions give the same."""
    narrow, wide = kernel(dialect, "bf16"), kernel(dialect)
    assert len(narrow.plan.steps) < len(wide.plan.steps)
    for n in (5, 2000):
        x = values(n).bfloat16()
        check_all(found := numbers(narrow, x), x)
        assert torch.equal(found, numbers(wide, x.float()))


def test_instructions_to_compile_do_not_grow_with_a_tensor() -> None:
    small, large = (count_of(kernel("nki"), (n, 4096)) for n in (1 << 10, 1 << 20))
    assert small == large


def test_the_host_reads_nothing() -> None:
    """Tensors without data do, so that no step waits for the device."""
    program = kernel("nki").plan.program
    with FakeTensorMode():
        found = sums_of(program, KINDS, torch.empty(4, 7 * len(program.measures)), 3000)
    assert found.shape == (4, 3)


def test_xla_puts_them_together_as_torch_does(xla: torch.device) -> None:
    """Bit for bit: no compiler reorders the sums of pairs, and contracted products are exact."""
    k, x = kernel("nki"), values(40000, 30)
    totals = measured(k, x, Cut(100, 50))[None]
    found = sums_of(k.plan.program, KINDS, totals.to(xla), x.numel())
    assert torch.equal(found.cpu()[0], defined(x))


# Of rows

OF_ROWS = (sum_to, mean_to, norm_to)
RESULTS = (ROW, COLUMN, MATRIX, NUMBER)
VIEWS = ((1, 700, 1), (3, 5, 37), (1, 2, 2600))


@pytest.fixture
def machine(dialect: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    search_less(monkeypatch, steps=20)
    yield Machine("trn1", dialect)
    calls.kernel_of.cache_clear()


def found_of(x: Tensor, machine: Machine) -> list[tuple[Any, str, Tensor]]:
    asked = [(kind, extent) for kind in OF_ROWS for extent in RESULTS]
    found = sums_for([Wanted(kind, extent, [x]) for kind, extent in asked], machine)
    return [(*pair, result) for pair, result in zip(asked, found, strict=True)]


def groups(x: Tensor, extent: str) -> list[list[Fraction]]:
    """The elements that each result is of."""
    gone = [d for d in range(3) if d not in DIMENSIONS[extent]]
    kept = [d for d in range(3) if d not in gone]
    flat = x.permute(*kept, *gone).reshape(math.prod(x.shape[d] for d in kept), -1)
    return [[Fraction(v) for v in row] for row in flat.tolist()]


@pytest.mark.parametrize("view", VIEWS)
def test_rows_are_within_their_bounds_and_almost_always_fp64(view: tuple[int, int, int], machine: Machine) -> None:
    x = values(view, 30)
    for given in (x, x.bfloat16()):
        other, count = 0, 0
        for kind, extent, found in found_of(given, machine):
            check(kind, found, groups(given.float(), extent))
            right = of_elements(kind, given.float(), extent)
            assert found.shape == right.shape
            other, count = other + int((found != right).sum()), count + found.numel()
        assert other <= 1 + count / 1000


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_what_is_empty(shape: tuple[int, ...], machine: Machine) -> None:
    for kind, extent, found in found_of(torch.zeros(shape), machine):
        right = of_elements(kind, torch.zeros(shape), extent)
        assert found.shape == right.shape
        assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))


ROWS: tuple[tuple[float, ...], ...] = (
    (3e38, 3e38, 1.0), (3e38, -3e38, 1e38), (3e-45, 3e-45, 0.0), (3e-45, 1e38, 0.0), (math.inf, 1.0, 2.0),
    (-math.inf, 1.0, 2.0), (math.inf, -math.inf, 0.0), (math.nan, math.inf, 1.0), (0.0, 0.0, 0.0), (-0.0, -0.0, -0.0),
    (1.0, 2.0, 3.0),
)  # fmt: skip


def test_extremes_stay_in_their_row(machine: Machine) -> None:
    x = torch.tensor(ROWS)[None]
    for given, extent in ((x, ROW), (x.mT.contiguous(), COLUMN)):
        for kind in OF_ROWS:
            (found,) = sums_for([Wanted(kind, extent, [given])], machine)
            assert same(found, of_elements(kind, given, extent))
            assert same(of_values(kind, given, extent), of_elements(kind, given, extent))


SMALLER: tuple[tuple[tuple[int, ...], str], ...] = (
    ((1, 300, 1), MATRIX), ((3, 70, 1), MATRIX), ((3, 70, 1), NUMBER), ((2, 1, 90), MATRIX), ((2, 1, 90), NUMBER),
    ((60, 1, 1), NUMBER), ((300, 3, 1), MATRIX),
)  # fmt: skip


@pytest.mark.parametrize(("shape", "extent"), SMALLER)
@pytest.mark.parametrize("kind", OF_ROWS)
def test_sums_of_values(kind: Any, shape: tuple[int, ...], extent: str) -> None:
    """Within 2**-37 before they are rounded, with and without a dimension for parameters."""
    given = torch.stack([values(shape, 40, seed) for seed in range(2)])
    for x in given:
        found, right = of_values(kind, x, extent), kind(x, extent)
        assert found.shape == right.shape
        check(kind, found, groups(x, extent))
        assert torch.equal(found, right)
    assert torch.equal(of_values(kind, given, extent), kind(given, extent))
