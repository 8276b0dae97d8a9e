"""The study's shortened formats and its closed-form sharpness, against brute force."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from study.reduced import ReducedLinear, reduce_linears, reduce_mantissa
from study.sharpness import EPSILON, sharpness
from torch import Tensor, nn
from torch.nn import functional as F

MANTISSAS = (1, 4, 7)


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


@pytest.mark.parametrize("mantissa", MANTISSAS)
@pytest.mark.parametrize("rounding", ["truncation", "nearest"])
def test_a_shortened_number_is_the_one_that_rationals_say(rounding: str, mantissa: int) -> None:
    x = numbers()[::29]
    pairs = zip(x.tolist(), reduce_mantissa(x, mantissa, rounding).tolist(), strict=True)
    for number, rounded in pairs:
        expected = neighbours(number, mantissa)[0] if rounding == "truncation" else nearest(number, mantissa)
        assert abs(Fraction(rounded)) == expected, number
        assert math.copysign(1, rounded) == math.copysign(1, number)


@pytest.mark.parametrize("mantissa", MANTISSAS)
def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased(mantissa: int) -> None:
    torch.manual_seed(0)
    draws = 20_000
    for number in (1.1, -1.23456, 0.7, 3.999):
        x = torch.tensor(number)  # the fp32 number
        below, above = map(float, neighbours(x.item(), mantissa))
        found = reduce_mantissa(x.expand(draws).clone(), mantissa, "stochastic").double().abs()
        assert set(found.unique().tolist()) <= {below, above}
        share = (x.double().abs() - below) / (above - below)
        deviation = (share * (1 - share) / draws).sqrt()  # of the share that went up, binomially
        assert abs((found == above).double().mean() - share) < 5 * deviation


def test_every_matrix_multiplication_of_a_reduced_layer_reads_rounded_numbers() -> None:
    torch.manual_seed(0)
    layer, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(layer.state_dict())
    reduce_linears(layer, 3, "nearest")
    assert isinstance(layer, ReducedLinear)
    x, g = torch.randn(4, 5, requires_grad=True), torch.randn(4, 3)
    y = layer(x)
    y.backward(g)
    rx, rw, rg = (reduce_mantissa(t.detach(), 3, "nearest") for t in (x, layer.weight, g))
    assert torch.equal(y, F.linear(rx, rw, layer.bias))
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, rg.T @ rx, rtol=2**-20, atol=0)  # a sum of four, in another order
    torch.testing.assert_close(x.grad, rg @ rw, rtol=2**-20, atol=2**-24)
    assert not torch.allclose(y, twin(x))


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
