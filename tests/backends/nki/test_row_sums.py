"""Sums over rows, columns and matrices by kernels, and of values by torch: beside exact ones and those of fp64.

Evidence level: stand-in and independent interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import nki_standin
import pytest
import torch
from nki_runs import INFINITY, bits, search_less
from second_reader import results
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.matrix_sums import (
    COLUMN,
    DIMENSIONS,
    MATRIX,
    NUMBER,
    ROW,
    mean_to,
    norm_to,
    of_elements,
    sum_to,
)
from collage_neuron.passes.backends.nki import calls, custom_op, source_cache
from collage_neuron.passes.backends.nki.chunk_totals import of_values, sums_of
from collage_neuron.passes.backends.nki.cut import parts_of
from collage_neuron.passes.backends.nki.row_sums import (
    OF_ROW,
    Wanted,
    X,
    kernel_for,
    laid_out,
    rows_of,
    sums_for,
)
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.backends.nki.tiling import Tiling

KINDS = (sum_to, mean_to, norm_to)
RESULTS = (ROW, COLUMN, MATRIX, NUMBER)
VIEWS = ((1, 40, 30), (1, 1, 1031), (1, 700, 1), (3, 5, 37), (2, 1100, 3), (1, 2, 2600))


@pytest.fixture(params=["nki", "beta1"])
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    search_less(monkeypatch, steps=20)
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    with nki_standin.install(request.param, "trn1", INFINITY):
        yield Machine("trn1", request.param)
    custom_op.function.cache_clear()
    calls.kernel_of.cache_clear()


def values(shape: tuple[int, ...], spread: int, seed: int = 0) -> Tensor:
    """Of both signs and of many magnitudes."""
    g = torch.Generator().manual_seed(math.prod(shape) + seed)
    return torch.randn(shape, generator=g) * torch.randint(-spread, spread + 1, shape, generator=g).float().exp2()


def found_of(x: Tensor, machine: Machine) -> list[tuple[Any, str, Tensor]]:
    asked = [(kind, extent) for kind in KINDS for extent in RESULTS]
    found = sums_for([Wanted(kind, extent, [x]) for kind, extent in asked], machine)
    return [(*pair, result) for pair, result in zip(asked, found, strict=True)]


def groups(x: Tensor, extent: str) -> list[list[Fraction]]:
    """The elements that each result is of."""
    gone = [d for d in range(3) if d not in DIMENSIONS[extent]]
    kept = [d for d in range(3) if d not in gone]
    flat = x.permute(*kept, *gone).reshape(math.prod(x.shape[d] for d in kept), -1)
    return [[Fraction(v) for v in row] for row in flat.tolist()]


def check(kind: Any, found: Tensor, of: list[list[Fraction]]) -> None:
    """2**-37 of the sum of magnitudes, 2**-36 of a norm, and one rounding to fp32."""
    unit, off = Fraction(1, 1 << 24), Fraction(1, 1 << 24) * (1 + Fraction(1, 1 << 12))
    for got, terms in zip(map(Fraction, found.flatten().tolist()), of, strict=True):
        n = len(terms) if kind is mean_to else 1
        if kind is norm_to:
            square = sum((v * v for v in terms), Fraction())
            assert square * (1 - off) ** 2 <= got * got <= square * (1 + off) ** 2
        else:
            total, size = sum(terms, Fraction()) / n, sum(map(abs, terms), Fraction()) / n
            assert abs(got - total) <= unit * abs(total) + Fraction(1, 1 << 37) * size


@pytest.mark.parametrize("view", VIEWS)
def test_results_are_within_their_bounds_and_almost_always_those_of_fp64(
    view: tuple[int, int, int], machine: Machine
) -> None:
    x = values(view, 30)
    for given in (x, x.bfloat16()):
        other, count = 0, 0
        for kind, extent, found in found_of(given, machine):
            check(kind, found, groups(given.float(), extent))
            right = of_elements(kind, given.float(), extent)
            assert found.shape == right.shape
            other, count = other + int((found != right).sum()), count + found.numel()
        assert other <= 1 + count / 1000


def test_several_parameters_have_sums_of_their_own(machine: Machine) -> None:
    given = [values((2, 9, 33), 9, seed) for seed in range(3)]
    for kind, extent in itertools.product(KINDS, RESULTS):
        (found,) = sums_for([Wanted(kind, extent, given)], machine)
        right = torch.stack([of_elements(kind, x, extent) for x in given])
        assert torch.equal(found.flatten(), right.flatten())
        assert found.dim() == 4


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_what_is_empty(shape: tuple[int, ...], machine: Machine) -> None:
    for kind, extent, found in found_of(torch.zeros(shape), machine):
        right = of_elements(kind, torch.zeros(shape), extent)
        assert found.shape == right.shape
        assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))


EXTREMES: tuple[tuple[float, ...], ...] = (
    (3e38, 3e38, 1.0), (3e38, -3e38, 1e38), (3e-45, 3e-45, 0.0), (3e-45, 1e38, 0.0), (math.inf, 1.0, 2.0),
    (-math.inf, 1.0, 2.0), (math.inf, -math.inf, 0.0), (math.nan, math.inf, 1.0), (0.0, 0.0, 0.0), (-0.0, -0.0, -0.0),
    (1.0, 2.0, 3.0),
)  # fmt: skip


def same(found: Tensor, right: Tensor) -> bool:
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(
        bits(found[~found.isnan()]), bits(right[~right.isnan()])
    )


def test_extremes_stay_in_their_row(machine: Machine) -> None:
    x = torch.tensor(EXTREMES)[None]
    for given, extent in ((x, ROW), (x.mT.contiguous(), COLUMN)):
        for kind in KINDS:
            (found,) = sums_for([Wanted(kind, extent, [given])], machine)
            assert same(found, of_elements(kind, given, extent))
            assert same(of_values(kind, given, extent), of_elements(kind, given, extent))


@pytest.mark.parametrize("columns", [512, 1024, 2048])
def test_no_chunk_has_two_rows(columns: int) -> None:
    tiling = Tiling(columns, 512, 0)
    for count, length in itertools.product((1, 2, 129), (1, 2, 3, 511, 512, 513, 1031, 1536, 4096, 6656, 8191)):
        x = torch.ones(count, length)
        padded, cut = laid_out(x, tiling)
        assert torch.equal(padded[:, :length], x)
        assert not padded[:, length:].any()
        assert padded.shape[1] % cut.width == 0
        assert padded.shape[1] - length < padded.shape[1] // cut.width  # less than a zero for each chunk
        assert (cut.columns % cut.width, padded.shape[1] % cut.columns) == (0, 0)
        assert cut.width <= 512
        assert cut.columns <= columns
        lines = [part.lines for part in parts_of(padded.numel(), cut)]
        assert 1 not in lines or padded.numel() == cut.width


def test_a_chunk_with_two_rows_is_noticed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpadded(rows: Tensor, tiling: Tiling) -> Any:
        padded, cut = laid_out(rows, tiling)
        return torch.nn.functional.pad(rows.flatten(), (0, padded.numel() - rows.numel())).view(padded.shape), cut

    x = values((1, 3, 1031), 3)
    monkeypatch.setattr("collage_neuron.passes.backends.nki.row_sums.laid_out", unpadded)
    (found,) = sums_for([Wanted(sum_to, ROW, [x])], machine)
    assert not torch.equal(found, of_elements(sum_to, x, ROW))


def test_a_second_reader_of_the_kernel_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, steps=20)
    kernel = kernel_for(True, Machine("trn1", "beta1"), torch.float32)
    calls.kernel_of.cache_clear()
    x = values((1, 131, 600), 20)
    rows, cut = laid_out(rows_of(ROW, x), kernel.tiling)
    measured = results(kernel, {X: rows}, torch.zeros(0), cut)["measures"].view(131, -1)
    found = sums_of(kernel.plan.program, [OF_ROW[norm_to]], measured, 600)
    assert torch.equal(found.view(1, 131, 1), of_elements(norm_to, x, ROW))


SMALLER: tuple[tuple[tuple[int, ...], str], ...] = (
    ((1, 300, 1), MATRIX), ((3, 70, 1), MATRIX), ((3, 70, 1), NUMBER), ((2, 1, 90), MATRIX), ((2, 1, 90), NUMBER),
    ((60, 1, 1), NUMBER),
)  # fmt: skip


@pytest.mark.parametrize(("shape", "extent"), SMALLER)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_values(kind: Any, shape: tuple[int, ...], extent: str) -> None:
    """Within 2**-37 before they are rounded, with and without a dimension for parameters."""
    given = torch.stack([values(shape, 40, seed) for seed in range(2)])
    for x in given:
        found, right = of_values(kind, x, extent), kind(x, extent)
        assert found.shape == right.shape
        check(kind, found, groups(x, extent))
        assert torch.equal(found, right)
    assert torch.equal(of_values(kind, given, extent), kind(given, extent))


@pytest.mark.parametrize("kind", KINDS)
def test_xla_computes_them_as_torch_does_and_the_host_reads_nothing(kind: Any, xla: torch.device) -> None:
    x = values((2, 900, 1), 40)
    assert torch.equal(of_values(kind, x.to(xla), MATRIX).cpu(), of_values(kind, x, MATRIX))
    with torch_privates.fake_tensors():
        assert of_values(kind, torch.empty(4, 2, 9, 1), MATRIX).shape == (4, 2, 1, 1)


def test_squares_that_are_rounded_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collage_neuron.passes.backends.nki.chunk_totals._squares", torch.square)
    given = [values((1, 2, 1), 0, seed) for seed in range(200)]
    assert not all(torch.equal(of_values(norm_to, x, NUMBER), norm_to(x, NUMBER)) for x in given)
