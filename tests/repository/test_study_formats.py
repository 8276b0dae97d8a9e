"""The study's closed-form sharpness, against brute force."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from study.sharpness import EPSILON, sharpness
from torch import Tensor


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
