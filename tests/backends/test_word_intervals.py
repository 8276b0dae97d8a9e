"""The oracle of intervals for operations on words and on bits: what numbers inside give is inside, up to both ends."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from word_intervals import ON_BITS, ON_WORDS, Ends, on_bits

from collage_neuron.numerics import eft

N, INSIDE = 3 * 128 + 50, 64
Drawn = tuple[Ends, Tensor]
"""Intervals, and numbers in each of them, the ends among them."""


def between(low: Tensor, high: Tensor, g: torch.Generator) -> Drawn:
    """Evenly drawn on the line of all fp32 numbers, or of int32 if the ends are."""
    a, b = (ordinals(x) if x.is_floating_point() else x.long() for x in (low, high))
    inside = a + (torch.rand((INSIDE, N), generator=g, dtype=torch.float64) * (b - a + 1)).long()
    inside[0], inside[1] = a, b
    if not low.is_floating_point():
        return (low, high), inside.int()
    return (low.double(), high.double()), ordinals(inside.int()).int().view(torch.float32)


def ordinals(x: Tensor) -> Tensor:
    """Bits of fp32 numbers with those of negative ones reversed, so that they rise; and back."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(2**31) - bits - 1, bits)


def numbers(g: torch.Generator, sign: bool = True) -> Drawn:
    """Some intervals of a few numbers, some of a few bf16 numbers, some of many binades; with and without zero."""
    x = torch.randn(N, generator=g) * torch.exp2(torch.randint(-20, 20, (N,), generator=g).float())
    width = torch.exp2(-26 + 30 * torch.rand(N, generator=g)) * x.abs()
    low, high = (x - width, x + width) if sign else (x.abs(), x.abs() + width)
    return between(low, high, g)


def bf16(g: torch.Generator) -> Drawn:
    (low, high), inside = numbers(g)
    low, high = (torch.where(x == 0, 1.0, x.bfloat16().double()) for x in (low, high))
    return (low, high), torch.cat([low[None].float(), high[None].float(), inside[2:].bfloat16().float()])


def integers(g: torch.Generator, least: int, most: int, width: int) -> Drawn:
    low = torch.randint(least, most - width, (N,), generator=g).int()
    return between(low, low + torch.randint(0, width, (N,), generator=g).int(), g)


def whole(drawn: Drawn) -> Drawn:
    """The same integers, as float64 ends and fp32 numbers."""
    (low, high), inside = drawn
    return (low.double(), high.double()), inside.float()


CASES: dict[str, tuple[Any, Callable[[torch.Generator], list[Any]]]] = {
    "power_of_two": (eft.power_of_two, lambda g: [numbers(g)]),
    "inverse_power_of_two": (eft.inverse_power_of_two, lambda g: [numbers(g)]),
    "block_max": (eft.block_max, lambda g: [numbers(g), 128]),
    "places": (eft.places, lambda g: [numbers(g)]),
    "limit_places": (eft.limit_places, lambda g: [numbers(g), 32512]),
    "beyond": (eft.beyond, lambda g: [bf16(g), whole(integers(g, -(2**15), 2**15, 99))]),
    "stochastic_round": (eft.stochastic_round, lambda g: [numbers(g), integers(g, 0, 2**16, 1)]),
    "bits_of": (eft.bits_of, lambda g: [numbers(g, sign=False)]),
    "from_bits": (eft.from_bits, lambda g: [integers(g, 0, 0x7F800000, 10**6)]),
    "whole": (eft.whole, lambda g: [whole(integers(g, -(2**23), 2**23, 99))]),
    "shift_right": (eft.shift_right, lambda g: [integers(g, 0, 2**31 - 1, 10**6), 20]),
    "shift_left": (operator.lshift, lambda g: [integers(g, 0, 256, 9), 20]),
    "add": (operator.add, lambda g: [integers(g, 0, 2**30, 10**6), integers(g, 0, 2**30, 99)]),
    "or": (operator.or_, lambda g: [integers(g, 0, 2**28, 10**6), 96 << 23]),
    "and": (operator.and_, lambda g: [integers(g, -(2**31), 2**31 - 1, 1), 0xFFFF]),
    "xor": (operator.xor, lambda g: [integers(g, -(2**31), 2**31 - 1, 1), 0x1BD11BDA]),
}


def found(target: Any, drawn: list[Any]) -> Ends:
    ends = [x[0] if isinstance(x, tuple) else x for x in drawn]
    return ON_WORDS[target](*ends) if target in ON_WORDS else on_bits(target, *ends)


@pytest.mark.parametrize("name", CASES)
def test_an_operation_stays_between_the_ends_and_reaches_both(name: str) -> None:
    target, draw = CASES[name]
    drawn = draw(torch.Generator().manual_seed(0))
    results = target(*(x[1] if isinstance(x, tuple) else x for x in drawn)).double()
    low, high = (x.double() for x in found(target, drawn))
    assert ((results >= low) & (results <= high)).all()
    assert float((results == low).any(0).double().mean()) > 0.3
    assert float((results == high).any(0).double().mean()) > 0.3


def test_every_operation_on_words_and_bits_has_intervals() -> None:
    assert {target for target, _ in CASES.values()} >= ON_WORDS.keys() | ON_BITS | eft.ON_BITS


@pytest.mark.parametrize(
    ("target", "operands"),
    [
        (operator.xor, [(3, 5), 1]),
        (operator.and_, [(3, 5), 1]),
        (operator.or_, [(3, 5), 4]),
        (operator.lshift, [(1, 1 << 20), 12]),
        (operator.add, [(0, 2**31 - 1), 1]),
        (eft.shift_right, [(-1, 1), 4]),
    ],
)
def test_an_interval_that_may_turn_around_is_rejected(target: Any, operands: list[Any]) -> None:
    ends = [tuple(torch.tensor([v]).int() for v in x) if isinstance(x, tuple) else x for x in operands]
    with pytest.raises(AssertionError):
        on_bits(target, *ends)
