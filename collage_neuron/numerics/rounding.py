"""The rounding errors of a storage format, measured on the format itself."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from collage_neuron.numerics.formats import Format

SMALL = 2.0**-124
"""An absolute term: near the end of the range words are subnormal, and devices flush those to zero."""


def rounding(fmt: Format, size: Tensor) -> Tensor:
    """The largest error of storing values of magnitude `size`: half an ulp, or one if rounding is stochastic."""
    if fmt.error is not None:
        return 1.01 * fmt.error(size) + SMALL
    relative = 2.0 ** -digits(fmt) * (1 if fmt.draw is None else 2)
    return 1.01 * relative * size + SMALL


@cache
def leading(fmt: Format) -> float | None:
    """The relative error of the first component alone; None if it does not approximate the value.

    For a parameter, the first component is the number with which the model computes.
    """
    x = 1 + _steps() * 2.0**-12
    first = fmt.encode(x)[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    off = float((first.float() - x).abs().max())
    return 2.02 * off if off < 2.0**-2 else None


@cache
def digits(fmt: Format) -> int:
    """The precision of a format: its relative error is at most 2**-digits. Measured: bf16 8, hi + lo 17, fp32 24."""
    # A binade in steps of 2**-12, with other lower bits in each, so that no format holds all of them by chance.
    x = 1 + _steps() * 2.0**-12 + 2.0**-23 * _steps()
    error = (fmt.decode(fmt.encode(x)) - x).abs().max().item()
    return 24 if error == 0 else -int(torch.tensor(error, dtype=torch.float32, device="cpu").log2().ceil())


def _steps() -> Tensor:
    return torch.arange(1 << 12, dtype=torch.float32, device="cpu")
