"""Numbers, updates and oracles for the tests of error-free transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from exact import (
    from_bits,
    to_bits,
    update_of,
    without_rounding,
)

from collage_neuron.numerics.eft import (
    Expansion,
    Value,
    round_to,
)
from collage_neuron.passes.ir.update import Update

Tensors = Sequence[torch.Tensor]


Run = Callable[[Update, Tensors], list[torch.Tensor]]
"""Runs an update without scalars on CPU tensors; results on the CPU."""


GAPS = torch.arange(-26, 27).view(-1, 1, 1, 1)


SIGNIFICANDS = torch.arange(128, 256, dtype=torch.float64)


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every a and b (float64 integers) of the domain, shaped [gap, sign of b, significand of a, of b]."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
    a = torch.ldexp(SIGNIFICANDS.view(1, 1, -1, 1), GAPS.clamp(min=0))
    b = torch.ldexp(signs * SIGNIFICANDS.view(1, 1, 1, -1), (-GAPS).clamp(min=0))
    a, b = torch.broadcast_tensors(a, b)
    return a.contiguous(), b.contiguous()


A, B = all_pairs()


def sum_update(algorithm: Callable[[Value, Value], Expansion]) -> Update:
    return update_of(("a", "b"), algorithm)


# Once the first rounding has fixed s, a + b - s is a bf16 number, and fp32 has bits enough to find it without rounding
# on the way: with any of the later roundings gone the words are the same. fast_two_sum's z and lo and two_prod's lo are
# exact even without fp32 (Dekker 1971). They all stay in the graph: a backend that computes in narrower values rounds
# there anyway, and verify and the HLO show where a value is narrow.
HARMLESS = {
    "two_sum": ("bb", "aa", "db", "da", "lo"),
    "fast_two_sum": ("z", "lo"),
    "two_prod": ("lo",),
    "split": (),
    "grow": ("z", "v", "z'", "lo"),
    "scale": ("q", "z", "lo"),
}


WORDS = {
    "two_sum": ("s", "bb", "aa", "db", "da", "lo"),
    "fast_two_sum": ("s", "z", "lo"),
    "two_prod": ("p", "lo"),
    "split": ("hi", "lo"),
    "grow": ("u", "z", "v", "lo + v", "hi", "z'", "lo"),
    "scale": ("p", "q", "hi * clo", "lo * chi", "cross", "q + cross", "hi", "z", "lo"),
}
"""What each `round_to` of an algorithm rounds, in order."""


def harmless(name: str, update: Update, mismatches: Callable[[Update], int]) -> tuple[str, ...]:
    """The roundings of the algorithm `name` without which nothing is wrong."""
    broken = [b for _, b in without_rounding(update)]
    return tuple(word for word, b in zip(WORDS[name], broken, strict=True) if mismatches(b) == 0)


ROUNDING = update_of(("x",), lambda x: [round_to(x, "bf16")])


# The 16 bits that a rounding drops decide by being below, at, or above one half: its neighbours and both ends.
LOW_HALVES = torch.tensor([0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])


ALL_BITS = (torch.arange(1 << 16).view(-1, 1) << 16 | LOW_HALVES).flatten()


def nearest_even_bits(bits: torch.Tensor) -> torch.Tensor:
    """Rounding as integers do it: the carry runs into the exponent, past the largest number to infinity."""
    down, low = bits & ~0xFFFF, bits & 0xFFFF
    odd = (bits >> 16 & 1).bool()
    return down + torch.where((low > 0x8000) | ((low == 0x8000) & odd), 0x10000, 0)


def wrong_roundings(run: Run, update: Update) -> torch.Tensor:
    x = from_bits(ALL_BITS)
    (result,) = run(update, [x])
    return torch.where(x.isnan(), ~result.isnan(), to_bits(result) != nearest_even_bits(ALL_BITS))
