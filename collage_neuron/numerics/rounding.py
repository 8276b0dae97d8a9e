"""What a storage format rounds, measured on the format itself."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from collage_neuron.numerics.formats import Format, format_named

SMALL = 2.0**-124
"""An absolute term: near the end of the range words are subnormal, and devices flush those to zero."""


def rounding(fmt: Format, size: Tensor) -> Tensor:
    """By how much storing values of magnitude `size` may change them: half an ulp, or one where rounding is drawn."""
    relative = 2.0 ** -digits(fmt.name) * (1 if fmt.draw is None else 2)
    return 1.01 * relative * size + SMALL


@cache
def leading(fmt: Format) -> float | None:
    """How far the first component may be from the value, of the value; None if it is no approximation of it.

    That of a parameter is what the model computes with.
    """
    x = 1 + torch.arange(1 << 12) * 2.0**-12
    first = fmt.encode(x)[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    off = float((first.float() - x).abs().max())
    return 2.02 * off if off < 2.0**-2 else None


@cache
def digits(name: str) -> int:
    """A storage format rounds a number by at most 2**-digits of itself; measured: bf16 8, hi + lo 17, fp32 24."""
    fmt = format_named(name)
    x = 1 + torch.arange(1 << 12) * 2.0**-12 + 2.0**-23 * torch.arange(1 << 12)
    error = (fmt.decode(fmt.encode(x)) - x).abs().max().item()
    return 24 if error == 0 else -int(torch.tensor(error).log2().ceil())
