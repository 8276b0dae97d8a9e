"""Roundings to e4m3 (up to 240) and e5m2 against exact rationals: every code, every tie, subnormals, saturation.

Eagerly and on XLA's CPU device; native code rounds to neither, and leaves updates with such words to the reference.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from fp8_models import LIMITS, rounded

from collage_neuron.numerics.eft import narrow, round_to
from collage_neuron.passes.scaling.operations import amax_powers, measure

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


OCP = 3, -6, 448.0
"""Those of e4m3fn as torch has it, in which torchao's recipe computes."""


@pytest.fixture(params=["cpu", "xla"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a rounding is computed."""
    found: torch.device = request.getfixturevalue("xla") if request.param == "xla" else torch.device("cpu")
    return found


def codes(fmt: str) -> list[Fraction]:
    """All numbers of a type from 0 on, in order: by definition, not from torch."""
    digits, least, largest = LIMITS.get(fmt, OCP)
    found = {Fraction(m) * Fraction(2) ** (least - digits) for m in range(2 << digits)}
    e = least
    while Fraction(2) ** e <= largest:
        found |= {Fraction(m) * Fraction(2) ** (e - digits) for m in range(1 << digits, 2 << digits)}
        e += 1
    return sorted(x for x in found if x <= largest)


def nearest(x: Fraction, among: list[Fraction]) -> Fraction:
    """To nearest; of two the one whose code is even, which is every second one from 0 on."""
    i = min(range(len(among)), key=lambda i: (abs(among[i] - abs(x)), i % 2))
    return among[i] if x >= 0 else -among[i]


def probes(fmt: str) -> list[float]:
    """Every code and every midpoint, and the fp32 numbers next to them; beyond the largest; both signs."""
    there = codes(fmt)
    points = [float(x) for x in there] + [float((a + b) / 2) for a, b in pairwise(there)]
    points += [float(there[-1]) * k for k in (1.0625, 2, 2.0**100)] + [2.0**-149]
    x = torch.tensor(points)
    around = torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(0.0))])
    return torch.cat([around, -around]).tolist()


@pytest.mark.parametrize("fmt", DTYPES)
def test_to_nearest_even_and_saturating(fmt: str, device: torch.device) -> None:
    there = codes(fmt)
    given = probes(fmt)
    wanted = [float(nearest(Fraction(x), there)) for x in given]
    assert round_to(torch.tensor(given).to(device), fmt).tolist() == wanted
    words = narrow(round_to(torch.tensor(given).to(device), fmt), fmt).cpu()  # what a dot reads
    assert words.dtype == DTYPES[fmt]
    assert words.float().tolist() == wanted
    assert rounded(torch.tensor(given), fmt).tolist() == wanted  # what other tests compare with


@pytest.mark.parametrize("fmt", DTYPES)
def test_every_code_of_torch_up_to_the_largest_is_one(fmt: str) -> None:
    held = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt]).float()
    within = held[held.abs() <= LIMITS[fmt][2]]
    assert sorted({abs(x) for x in within.tolist()}) == [float(x) for x in codes(fmt)]
    assert torch.equal(round_to(within, fmt), within)


def test_of_torch_e4m3fn_has_the_numbers_up_to_448(device: torch.device) -> None:
    """The type of the recipe that the study compares with, clamped as that does."""
    there, given = codes("e4m3fn"), probes("e4m3fn")
    found = torch.tensor(given).to(device).clamp(-OCP[2], OCP[2]).to(torch.float8_e4m3fn).float()
    assert there[-1] == 448
    assert found.tolist() == [float(nearest(Fraction(x), there)) for x in given]


@pytest.mark.parametrize("fmt", DTYPES)
def test_signs_of_zero_stay_and_nan_stays(fmt: str, device: torch.device) -> None:
    x = round_to(torch.tensor([0.0, -0.0, -(2.0**-149), torch.nan]).to(device), fmt).cpu()
    assert x[:3].tolist() == [0, 0, 0]
    assert torch.signbit(x[:3]).tolist() == [False, True, True]
    assert x[3].isnan()


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("size", [2.0**-50, 1.0, 3.7, 2.0**50])
def test_an_amax_fills_the_range_and_saturates_nothing(fmt: str, size: float) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)) * size
    scale, inverse = amax_powers(x, fmt)
    largest = float((x * scale).abs().max())
    assert LIMITS[fmt][2] / 4 < largest < LIMITS[fmt][2]
    assert scale * inverse == 1
    assert torch.frexp(scale).mantissa == 0.5


def test_an_amax_of_zeros_gives_zeros_and_of_nan_nan() -> None:
    scale, inverse = amax_powers(torch.zeros(3), "e4m3")
    assert scale * inverse == 1
    scale, inverse = amax_powers(torch.tensor([1.0, torch.nan]), "e4m3")
    assert (torch.tensor([1.0]) * scale * inverse).isnan()


def test_what_is_measured_of_an_operand() -> None:
    x = torch.tensor([300.0, -1000.0, 0.0, 2.0**-11, 1.0, 2.0**-12, 1.0, 1.0])
    power, saturated, vanished = measure(x, round_to(x, "e4m3"), "e4m3").tolist()
    assert power == 2.0**9  # rms 369, and 362 is halfway to it in the exponent
    assert saturated == 2 / 8
    assert vanished == pytest.approx(2 / 7)
