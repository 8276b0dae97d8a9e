"""What a rewritten matmul consists of, beside the explicit roundings of `numerics.eft`: these run eagerly.

Powers of two scale exactly, as long as a product stays in fp32's range: `LIMIT` keeps it there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.eft import narrow, power_of_two
from collage_neuron.numerics.storage import storage_named

LIMIT = 60
"""The largest exponent of a scale: a product of two stays below 2**120."""


def largest(fmt: str) -> float:
    """The largest number of a storage type: 240 of e4m3, 57344 of e5m2."""
    found = storage_named(fmt).largest
    assert found is not None
    return found


def amax_powers(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """The scale that brings the largest magnitude of x just below the largest power of two of `fmt`; its inverse.

    One reduction over x. A value that is not finite makes the scale so, and the product NaN.
    """
    amax = x.abs().max().clamp(min=2.0**-LIMIT)  # amax() of torch_xla 2.9 reduces nothing
    inverse = power_of_two(amax) * 2.0 ** (1 - math.floor(math.log2(largest(fmt))))
    return 1 / inverse, inverse  # a quotient of powers of two is exact


def dot(a: Tensor, b: Tensor, of_a: str, of_b: str) -> Tensor:
    """a @ b of fp32 values that are rounded to storage types: products are exact, and sums are those of fp32.

    On XLA it is a dot of words of 8 bits with a result in fp32.
    """
    if a.device.type == "xla":
        return torch_privates.xla_dot(narrow(a, of_a), narrow(b, of_b))
    return torch.mm(a, b)


def measure(scaled: Tensor, rounded: Tensor, fmt: str) -> Tensor:
    """Three numbers about an operand: the power of two nearest to its rms, and what part saturated and vanished.

    A power of 1 says that the scale is right. Of zeros it is 0, and of values that are not finite not finite.
    """
    rms = scaled.square().mean().sqrt()
    there = scaled != 0
    saturated = (scaled.abs() > largest(fmt)).float().mean()
    vanished = ((rounded == 0) & there).float().sum() / there.float().sum().clamp(min=1)
    return torch.stack([power_of_two(rms * 2**0.5), saturated, vanished])


def result(x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """The product in the dtype that the model computes in, after the bias was added: rounded once."""
    return (x if bias is None else x + bias.to(torch.float32)).to(dtype)
