"""Numbers, updates and oracles for the tests of error-free transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from exact import from_bits, to_bits, update_of

from collage_neuron.numerics.eft import Expansion, Value, round_to
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
