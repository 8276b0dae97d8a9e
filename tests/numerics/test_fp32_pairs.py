"""Pairs of fp32 numbers: sums, quotients and roots are as near to the exact ones as is said."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from collage_neuron.numerics.fp32_pairs import Pair, corrected, folded, halves, over, square_root


def numbers(size: int, spread: int) -> Tensor:
    g = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=g) * torch.randint(-spread, spread + 1, (size,), generator=g).float().exp2()


def exact(x: Pair) -> Fraction:
    return Fraction(float(x.hi)) + Fraction(float(x.lo))


def test_a_fold_is_within_its_bound() -> None:
    """2 * d**2 * 2**-48 of the sum of magnitudes; what cancels is no exception."""
    for size in (1, 2, 3, 1000, 5000):
        for spread in (0, 12, 40):
            x = numbers(size, spread)
            x = torch.cat([x, -x[: size // 2]])
            d = (len(x) - 1).bit_length()
            terms = [Fraction(t) for t in x.tolist()]
            assert abs(exact(folded(x)) - sum(terms)) <= 2 * d * d * Fraction(2) ** -48 * sum(map(abs, terms))


def test_halves_are_short_and_exact() -> None:
    x = numbers(10000, 20)
    a, b = halves(x)
    assert torch.equal(a.double() + b.double(), x.double())
    for half in (a, b):
        mantissa, _ = half.double().frexp()
        assert torch.equal(mantissa * 2**12, (mantissa * 2**12).round())


def test_quotients() -> None:
    x = numbers(1000, 20)
    low = x * numbers(1000, 0).clamp(-1, 1) * 2.0**-25
    for n in (1, 3, 7 << 20, 2**31 - 1):
        found = over(Pair(x, low), n)
        right = (x.double() + low.double()) / n
        assert ((found.hi.double() + found.lo.double() - right).abs() <= 2.0**-44 * right.abs()).all()


def test_roots_that_a_device_approximates() -> None:
    """Off by two ulps to either side, a root is corrected to 2**-43; that of one fp32 number has its bits."""
    x = numbers(100000, 15).abs() + 1e-6
    right = x.double().sqrt()
    for toward in (0.0, torch.inf):
        near = x.sqrt()
        for _ in range(2):
            near = near.nextafter(torch.full_like(near, toward))
        found = corrected(near, Pair(x, torch.zeros_like(x)))
        assert ((found.hi.double() + found.lo.double() - right).abs() <= 2.0**-43 * right).all()
    assert torch.equal(square_root(x), right.float())


def test_roots_of_what_has_none() -> None:
    found = square_root(torch.tensor([0.0, torch.inf, -1.0, torch.nan, 1e-44, 3e38]))
    assert torch.equal(found[:2], torch.tensor([0.0, torch.inf]))
    assert found[2:4].isnan().all()
    assert torch.equal(found[4:], torch.tensor([1e-44, 3e38]).double().sqrt().float())
