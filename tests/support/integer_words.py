"""A format with an integer word, added from outside: bf16 and an int8 that counts 256ths of its last place.

`lo` needs no exponent of its own: it counts in steps of 2**-15 of the power of two of `hi`. What it says is what the
value is beyond its rounding to bf16, to nearest even, and at most 127 steps. Where a step would be too small for fp32's
normal numbers, and where `hi` is no number, `lo` does not count, and 0 is stored.

Nothing here is known to a pass or a backend: it is written in explicit-rounding operations, as any format is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collage_neuron.numerics.eft import Value, bf16, inverse_power_of_two, narrow, power_of_two, round_to, widen
from collage_neuron.numerics.formats import Component, Format

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
