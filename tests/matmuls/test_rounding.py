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
from collage_neuron.passes.fp8_scaling.operations import amax_powers, cast, measure

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
@pytest.mark.parametrize("size", [2.0**-40, 1.0, 3.7, 2.0**50])
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
    power, saturated, vanished = measured(x, 1.0)
    assert power == 2.0**9  # rms 369, and 362 is halfway to it in the exponent
    assert saturated == pytest.approx((300**2 + 1000**2 - 2 * 240**2) / (300**2 + 1000**2), rel=1e-5)
    assert vanished == pytest.approx(2 / 7)
    assert measured(x, 2.0**-9)[:2] == [1, 0]
    assert measured(torch.tensor([1.0, torch.nan]), 1.0)[0] == torch.inf
    assert measured(torch.tensor([1.0, -torch.inf]), 1.0)[0] == torch.inf
    assert measured(torch.zeros(3), 1.0)[0] == 0
    assert measured(torch.zeros(0, 3), 1.0) == [0, 0, 0]


@pytest.mark.parametrize("power", [-120, -40, 40, 120])
def test_a_drift_is_measured_however_large(power: int) -> None:
    x = torch.tensor([1.0, -1.0]) * 2.0**power
    assert measured(x, 1.0)[0] == 2.0**power
    assert measured(x * 1.25, 2.0**-40)[0] == 2.0 ** max(power - 40, -120)


def measured(x: torch.Tensor, scale: float) -> list[float]:
    """What is measured of an operand in e4m3."""
    found: list[float] = measure(x, torch.tensor(scale), cast(x * scale, "e4m3"), "e4m3").tolist()
    return found


def test_ones_beside_zeros_fit_and_outliers_beside_numbers_saturate() -> None:
    """Root mean squares are 2**-10 and 2**6: of the first all fits under 240 at 2**-7, of the second all else is 0."""
    ones = torch.zeros(1 << 20)
    ones[5] = 1
    power = measured(ones, 1.0)[0]
    assert power == 2.0**-7
    assert measured(ones, 1 / power) == [1, 0, 0]
    beside = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    beside[5] = 2.0**16
    power, _, _ = measured(beside, 1.0)
    assert power == 2.0**6
    _, saturated, vanished = measured(beside, 1 / power)
    assert saturated == pytest.approx(1 - (240 * 2.0**6 / 2.0**16) ** 2, abs=0.01)
    assert vanished < 0.06


@pytest.mark.parametrize("fmt", DTYPES)
def test_a_cast_saturates_numbers_and_makes_nan_of_infinities(fmt: str, device: torch.device) -> None:
    x = torch.tensor([1e30, -1e30, 0.0, -0.0, -(2.0**-140), 1.0, torch.inf, -torch.inf, torch.nan])
    found = cast(x.to(device), fmt).cpu()
    limit = LIMITS[fmt][2]
    assert found[:6].tolist() == [limit, -limit, 0, 0, 0, 1]
    assert torch.signbit(found[:6]).tolist() == [False, True, False, True, True, False]
    assert bool(found[6:].isnan().all())
