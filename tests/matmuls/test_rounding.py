"""Roundings to narrow floats, by their definition: every number, what lies between two, signs, what saturates.

Eagerly and on XLA's CPU device; native code rounds to none, and leaves updates with such words to the reference.
"""

from __future__ import annotations

import math

import pytest
import torch
from fp8_models import LIMITS, rounded
from torch import Tensor

from collage_neuron.numerics.eft import narrow, round_to
from collage_neuron.passes.fp8_scaling.scaled_matmul import amax_powers, cast, measure

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OTHERS = {"fp16": (10, -14, 65504.0), "e4m3fn": (3, -6, 448.0)}
"""That of states, and e4m3fn as torch has it, in which torchao's recipe computes."""


@pytest.fixture(params=["cpu", "xla"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a rounding is computed."""
    found: torch.device = request.getfixturevalue("xla") if request.param == "xla" else torch.device("cpu")
    return found


def numbers(fmt: str) -> Tensor:
    """All numbers of a type from 0 on, in order: by definition, not from torch."""
    digits, least, largest = (LIMITS | OTHERS)[fmt]
    fraction = torch.arange(1 << digits, dtype=torch.float64) / (1 << digits)
    binades = [(1 + fraction) * 2.0**e for e in range(least, 1 + math.floor(math.log2(largest)))]
    found = torch.cat([fraction * 2.0**least, *binades])
    return found[found <= largest].float()


def in_type(x: Tensor, fmt: str) -> Tensor:
    """Rounded and saturated."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float() if fmt == "e4m3fn" else round_to(x, fmt)


@pytest.mark.parametrize("fmt", [*LIMITS, *OTHERS])
def test_to_nearest_even_and_saturating(fmt: str, device: torch.device) -> None:
    there = numbers(fmt)
    between = (there[1:] + there[:-1]) / 2
    even = torch.where(torch.arange(len(between)) % 2 == 0, there[:-1], there[1:])
    beyond = there[-1] * torch.tensor([1.01, 1.0625, 2.0, 2.0**100, torch.inf])
    x = torch.cat([there, between, between.nextafter(there[1:]), between.nextafter(there[:-1]), beyond])
    wanted = torch.cat([there, even, there[1:], there[:-1], there[-1].expand(5)])
    for sign in (1, -1):
        found = in_type((sign * x).to(device), fmt)
        assert torch.equal(found.cpu().view(torch.int32), (sign * wanted).view(torch.int32))
        if fmt in DTYPES:
            words = narrow(found, fmt).cpu()  # what a dot reads
            assert words.dtype == DTYPES[fmt]
            assert torch.equal(words.float(), sign * wanted)
            assert torch.equal(rounded(sign * x, fmt), sign * wanted)  # what other tests compare with
    assert in_type(torch.tensor(torch.nan).to(device), fmt).isnan()


@pytest.mark.parametrize("fmt", DTYPES)
def test_every_code_of_torch_up_to_the_largest_is_one(fmt: str) -> None:
    held = torch.arange(256, dtype=torch.uint8).view(DTYPES[fmt]).float()
    within = held[held.abs() <= LIMITS[fmt][2]]
    assert torch.equal(within.abs().unique(), numbers(fmt))
    assert torch.equal(round_to(within, fmt), within)


@pytest.mark.parametrize("fmt", DTYPES)
@pytest.mark.parametrize("size", [2.0**-40, 1.0, 3.7, 2.0**50])
def test_an_amax_fills_the_range_and_saturates_nothing(fmt: str, size: float) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0)) * size
    scale, inverse = amax_powers(x, fmt)
    largest = float((x * scale).abs().max())
    assert LIMITS[fmt][2] / 4 < largest < LIMITS[fmt][2]
    assert scale * inverse == 1
    assert torch.frexp(scale).mantissa == 0.5


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


def measured(x: torch.Tensor, scale: float) -> list[float]:
    """What is measured of an operand in e4m3."""
    found: list[float] = measure(x, torch.tensor(scale), cast(x * scale, "e4m3"), "e4m3").tolist()
    return found


@pytest.mark.parametrize("fmt", DTYPES)
def test_a_cast_saturates_numbers_and_makes_nan_of_infinities(fmt: str, device: torch.device) -> None:
    x = torch.tensor([1e30, -1e30, 0.0, -0.0, -(2.0**-140), 1.0, torch.inf, -torch.inf, torch.nan])
    found = cast(x.to(device), fmt).cpu()
    limit = LIMITS[fmt][2]
    assert found[:6].tolist() == [limit, -limit, 0, 0, 0, 1]
    assert torch.signbit(found[:6]).tolist() == [False, True, False, True, True, False]
    assert bool(found[6:].isnan().all())
