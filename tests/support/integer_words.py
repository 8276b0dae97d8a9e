"""A format with an integer word, added from outside: bf16 and an int8 that counts 256ths of its last place.

`lo` needs no exponent of its own: it counts in steps of 2**-15 of the power of two of `hi`. What it says is what the
value is beyond its rounding to bf16, to nearest even, and at most 127 steps. Where a step would be too small for fp32's
normal numbers, and where `hi` is no number, `lo` does not count, and 0 is stored.

Nothing here is known to a pass or a backend: it is written in explicit-rounding operations, as any format is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from exact import rounded, update_of
from torch import Tensor

from collage_neuron.numerics.eft import (
    Value,
    bf16,
    inverse_power_of_two,
    narrow,
    power_of_two,
    round_to,
    widen,
)
from collage_neuron.numerics.formats import Component, Format
from collage_neuron.passes.ir.update import Update

LEAST, MOST = 2.0**-110, 2.0**127
"""Powers of two of `hi` between which `lo` counts: a step is 2**-125 or more, and half of one a normal number."""

STEPS = 2.0**15
"""Steps in the power of two of `hi`: 2**7 last places, of 256 steps each."""


def _counts(unit: Value) -> Value:
    return torch.logical_and(unit >= LEAST, unit <= MOST)


def encode(x: Value) -> Sequence[Value]:
    """hi = bf16(x), lo = int8((x - hi) / step)."""
    hi = bf16(x)
    steps = (x - hi) * inverse_power_of_two(hi) * (STEPS / 2)
    lo = round_to(torch.where(_counts(power_of_two(hi)), steps, 0.0), "int8")
    return [narrow(hi, "bf16"), narrow(lo, "int8")]


def decode(words: Sequence[Value]) -> Value:
    """Hi + lo * step, exact in fp32."""
    hi, lo = map(widen, words)
    unit = power_of_two(hi)
    return torch.where(_counts(unit), hi + lo * (unit * (1 / STEPS)), hi)


BF16_INT8 = Format("bf16+256ths", (Component("", "bf16"), Component("_lo", "int8")), encode, decode)
"""Its keys are those of `bf16x2`: what is stored can be told by its type, or by the record of its format."""

ERROR = 2.0**-15
"""What storing a number changes it by, of itself, at most: a step, where lo would be 128; else half of one."""


def all_high_words() -> Tensor:
    """All 65 536 bf16."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def all_low_words() -> list[int]:
    """All 256 int8."""
    return list(range(-128, 128))


def grid() -> Tensor:
    """fp32 numbers around every bf16: halves, quarters and other parts of a step, ties and their neighbours."""
    hi = all_high_words().float()
    ulp = torch.ldexp(torch.ones_like(hi), torch.frexp(hi)[1] - 8)
    parts = torch.tensor([0, 1, 127, 128, 129, 191, 254, 255, 256], dtype=torch.float32) / 512  # of a last place
    at = torch.cat([parts, -parts, parts + 2.0**-16, -parts - 2.0**-16, torch.rand(7, generator=_seeded()) - 0.5])
    every = torch.tensor([1.0, -1.9921875, 1.5 * 2.0**100, 2.0**-109])[:, None] * (
        1 + torch.arange(-256, 257) * 2.0**-16
    )
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0, 2.0**-110, 2.0**-126])
    return torch.cat([(hi[:, None] + ulp[:, None] * at).reshape(-1), every.reshape(-1), ends])


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def is_normal(x: Tensor) -> Tensor:
    """Where `x` is zero, or no subnormal: what devices make of subnormals is their own."""
    return (x == 0) | (x.abs() >= 2.0**-126) | x.isnan()


def exact_value(hi: Tensor, lo: Tensor) -> Tensor:
    """What two words mean, in float64, from the definition: sums and powers of two alone, all of them exact there."""
    high = hi.double()
    unit = torch.ldexp(torch.ones_like(high), torch.frexp(high)[1] - 1)
    counts = high.isfinite() & (high.abs() >= LEAST)
    return torch.where(counts, high + lo.double() * unit / STEPS, high)


def exact_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """The words of fp32 numbers, in float64, from the definition: `hi` of unbounded exponent, but for overflow."""
    high = rounded(x.double())
    high = torch.where(high.abs() >= 2.0**128, high.sign() * torch.inf, high)
    unit = torch.ldexp(torch.ones_like(high), torch.frexp(high)[1] - 1)
    counts = high.isfinite() & (high.abs() >= LEAST)
    steps = torch.where(counts, (x.double() - high) / (unit / STEPS), 0.0)
    return torch.where(x.isfinite(), high, x.double()), steps.round().clamp(-128, 127)


def encoder() -> Update:
    """Encoding as an update of its own: an fp32 number in, two words out."""
    return update_of(["x"], encode, ["bf16", "int8"])


def decoder() -> Update:
    """Decoding as an update of its own: two words in, an fp32 number out."""
    return update_of(["hi", "lo"], lambda hi, lo: [decode([hi, lo])])
