"""The study's shortened formats and its closed-form sharpness, against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
import torch
from study.sharpness import EPSILON, sharpness
from torch import Tensor


def numbers() -> Tensor:
    """fp32 numbers around every representable one of E8M7 in three binades: its neighbours, ties, and what is near."""
    steps = torch.arange(3 * 128 * 16, dtype=torch.float64)
    exact = (1 + (steps % 2048) / 2048) * 2 ** (steps // 2048 - 1)  # a sixteenth of E8M7's ulp apart: ties included
    near = torch.cat([exact, exact * (1 + 2**-22), exact * (1 - 2**-22)]).float()
    return torch.cat([near, -near, torch.tensor([0.0, -0.0, 2**-149, -(2**-126), 3e38])])


def neighbours(x: float, mantissa: int) -> tuple[Fraction, Fraction]:
    """The largest number of the format not above |x|, and the smallest not below it, as rationals."""
    size = abs(Fraction(x))
    exponent = -126
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    ulp = Fraction(2) ** (exponent - mantissa)
    below = size // ulp * ulp
    return below, below if below == size else below + ulp


def nearest(x: float, mantissa: int) -> Fraction:
    below, above = neighbours(x, mantissa)
    size = abs(Fraction(x))
    if below == above or above - size != size - below:
        return below if size - below < above - size else above
    last = [n / (above - below) % 2 for n in (below, above)]
    return below if last[0] == 0 else above


def cross_entropy(z: Tensor, y: int) -> Tensor:
    """In float64 over the last dimension, written out."""
    return (z - z[..., y : y + 1]).exp().sum(-1).log()


@pytest.mark.parametrize("epsilon", [EPSILON, 0.1])
@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])
def test_the_closed_form_is_the_highest_corner_of_the_box(scale: float, epsilon: float) -> None:
    """The cross-entropy is convex in the logits, so that its maximum over a box is at one of the 2**n corners."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor(list(product((-1.0, 1.0), repeat=8)), dtype=torch.float64)
    for y in range(8):
        z = torch.randn(8, generator=generator, dtype=torch.float64) * scale
        reach = epsilon * (z.abs() + 1)
        loss = cross_entropy(z, y)
        brute = 100 * (cross_entropy(z + corners * reach, y).max() - loss) / (1 + loss)
        inside = torch.rand(1000, 8, generator=generator, dtype=torch.float64) * 2 - 1
        # Losses are differences of numbers up to some 2**6, off by a few 2**-53 of that, and brute is 100 times theirs.
        assert sharpness(z, torch.tensor(y), epsilon).item() == pytest.approx(brute.item(), abs=100 * 2**-44)
        assert (cross_entropy(z + inside * reach, y) <= loss + brute / 100 * (1 + loss) + 2**-44).all()
