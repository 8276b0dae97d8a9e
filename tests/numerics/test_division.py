"""Remainders and whole quotients against exact rationals, for quotients of every size, on each CPU backend."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
from exact import on_reference, on_xla, update_of
from native_mutants import hard
from natively import different, results
from torch import Tensor

from collage_neuron.numerics import division, eft
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.ir.update import Update

Run = Callable[[Update, list[Tensor]], Tensor]
BACKENDS: dict[str, Run] = {
    "reference": lambda update, xs: on_reference(update, xs)[0],
    "xla": lambda update, xs: on_xla(update, xs)[0],
}
if NATIVE.missing() is None:
    BACKENDS["native"] = lambda update, xs: results(NATIVE, update, xs)[0]


@cache
def inputs() -> tuple[Tensor, Tensor]:
    """Special values, each with each; random bits; then whole quotients, and numbers next to their multiples."""
    g = torch.Generator().manual_seed(4)
    x, y = hard()
    divisor = torch.randn(1 << 14, generator=g)
    multiple = divisor * torch.randint(-1000, 1000, (1 << 14,), generator=g)
    beside = [multiple, torch.nextafter(multiple, torch.tensor(math.inf)), torch.nextafter(multiple, torch.tensor(0.0))]
    counts = torch.randint(-300, 300, (2, 1 << 14), generator=g).float()
    return torch.cat([x, *beside, counts[0]]), torch.cat([y, *[divisor] * 3, counts[1]])


def found_by(backend: str, f: Callable[[Any, Any], Any]) -> Tensor:
    return BACKENDS[backend](update_of(("x", "y"), lambda x, y: [f(x, y)]), list(inputs()))


def usual(backend: str, wanted: Tensor) -> Tensor:
    """Where no operand, remainder or result is subnormal, which XLA takes for zero."""
    small = [(v != 0) & (v.abs() < 2.0**-126) for v in (*inputs(), remainders(), wanted)]
    return torch.ones_like(small[0]) if backend != "xla" else ~torch.stack(small).any(0)


def of_python(x: float, y: float) -> float:
    """The C library's remainder, which is exact."""
    return math.fmod(x, y) if math.isfinite(x) and y != 0 else math.nan


@cache
def remainders() -> Tensor:
    x, y = inputs()
    return torch.tensor(list(map(of_python, x.tolist(), y.tolist())), dtype=torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fmod_is_exact_for_every_quotient(backend: str) -> None:
    wanted = remainders().float()
    assert torch.equal(wanted.double().nan_to_num(0.5), remainders().nan_to_num(0.5))  # an fp32 number always
    assert not (different(found_by(backend, eft.fmod), wanted) & usual(backend, wanted)).any()


def test_the_remainders_of_the_c_library_are_those_of_rationals() -> None:
    x, y = (v[::97].tolist() for v in inputs())
    sizes = [abs(Fraction(a) / Fraction(b)) for a, b in zip(x, y, strict=True) if b and math.isfinite(a * 0 + b * 0)]
    assert max(sizes) > 2**240
    for a, b in zip(x, y, strict=True):
        if b and math.isfinite(a) and math.isfinite(b):
            exact = Fraction(a) - Fraction(b) * math.trunc(Fraction(a) / Fraction(b))
            assert exact == Fraction(of_python(a, b))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_remainder_has_the_sign_of_the_divisor_and_is_rounded_once(backend: str) -> None:
    y, rest = inputs()[1].double(), remainders()
    # The sum in double is rounded twice, which changes nothing: 53 >= 2 * 24 + 2.
    wanted = torch.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest).float()
    assert not (different(found_by(backend, division.remainder), wanted) & usual(backend, wanted)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_floored_quotient_is_exact_below_2_to_22(backend: str) -> None:
    x, y = inputs()
    found = found_by(backend, division.floor_quotient)
    quotient = x.double() / y.double()
    counts = (quotient.abs() < 2.0**22) & (quotient != 0) & y.isfinite() & usual(backend, found)
    for a, b, n in zip(*(v[counts][::7].tolist() for v in (x, y, found)), strict=True):
        assert n == Fraction(a) // Fraction(b)
    assert int(counts.sum()) > 2**16


@pytest.mark.parametrize("backend", BACKENDS)
def test_quotients_have_the_bits_of_torch(backend: str) -> None:
    """Of a floored one where torch's own remainder is right: it is not where the quotient overflows."""
    x, y = inputs()
    near = ((x.double() / y.double()).abs() < 2.0**120) | (y == 0) | ~x.isfinite() | ~y.isfinite()
    for f, mode, counts in (
        (division.floor_quotient, "floor", near),
        (division.truncated_quotient, "trunc", torch.ones_like(near)),
    ):
        wanted = torch.div(x, y, rounding_mode=mode)
        small = (x / y).abs() < 2.0**-126  # XLA's quotient is 0
        counts = counts & usual(backend, wanted) & ~(small if backend == "xla" else torch.zeros_like(small))
        assert not (different(found_by(backend, f), wanted) & counts).any(), mode
