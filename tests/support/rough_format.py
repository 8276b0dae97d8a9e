"""A user's format that no kernel for Trainium has: its scale is the largest magnitude of a block, no power of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collage_neuron.numerics.eft import Value, block_max, narrow, round_to, widen
from collage_neuron.numerics.formats import Component, Format


def _encode(x: Value) -> Sequence[Value]:
    largest = block_max(x, 128)
    scale = torch.where(largest > 2.0**-100, largest, 2.0**-100)
    return [narrow(round_to(x / scale, "bf16"), "bf16"), narrow(scale, "fp32")]


ROUGH = Format(
    "rough",
    (Component("", "bf16"), Component("_scale", "fp32", "block:128")),
    _encode,
    lambda words: widen(words[0]) * widen(words[1]),
)
