"""What a rewritten matmul consists of, beside the explicit roundings of `numerics.eft`: these run eagerly.

Powers of two scale exactly, as long as a product stays in fp32's range: `LIMITS` keeps it there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.eft import EXPONENT, narrow, power_of_two, round_to, storage_named

LIMITS: Mapping[str, int] = {"e4m3": 48, "e5m2": 76}
"""The largest exponent of a scale: a product of two stays below 2**124."""
VANISHING: Mapping[str, float] = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}
"""Half of the smallest number, which rounds to 0."""
CROWDED = 0.05
"""The part of an operand that may vanish for the sake of its largest elements."""


def largest(fmt: str) -> float:
    """The largest number of a storage type: 240 of e4m3, 57344 of e5m2."""
    found = storage_named(fmt).largest
    assert found is not None
    return found


def amax_powers(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """The scale that brings the largest magnitude of x just below the largest power of two of `fmt`; its inverse.

    One reduction over x.
    """
    if not x.numel():  # a batch without rows has no largest element
        return x.new_ones(()), x.new_ones(())
    amax = x.abs().max()  # amax() of torch_xla 2.9 reduces nothing
    inverse = exponent_of(amax) * 2.0 ** (1 - math.floor(math.log2(largest(fmt))))
    limit = 2.0 ** LIMITS[fmt]
    # A value that is not finite makes the scale so, and the product NaN.
    inverse = torch.where(amax < torch.inf, inverse.clamp(1 / limit, limit), torch.inf)
    return 1 / inverse, inverse  # a quotient of powers of two is exact


def exponent_of(x: Tensor) -> Tensor:
    """`power_of_two(x)`. On XLA within the program: torch_xla sends a tensor to the host for `view(torch.int32)`."""
    return _masked_on_xla()(x) if x.device.type == "xla" else power_of_two(x)


@cache
def _masked_on_xla() -> Callable[[Tensor], Tensor]:
    """An operation for torch_xla, of HLO: the bits of an fp32 value without sign and mantissa."""
    import torch_xla.core.xla_builder as xb  # an extra: imported only where parameters are on an XLA device
    from torch_xla.core.xla_op_registry import register

    def masked(x: Any) -> Any:
        mask = xb.Op.scalar(x.builder(), EXPONENT, dtype=xb.Type.S32)
        return (x.bitcast(xb.Type.S32) & mask.broadcast(x.shape().sizes)).bitcast(xb.Type.F32)

    operation: Callable[[Tensor], Tensor] = register("collage_neuron_exponent_of", masked)
    return operation


def cast(scaled: Tensor, fmt: str) -> Tensor:
    """An operand rounded to a storage type. Numbers saturate; infinities become NaN, which no later step overlooks."""
    rounded = round_to(scaled, fmt)
    if scaled.device.type == "xla":  # a compiler may take a product with 0 for 0
        return torch.where(scaled.abs() < torch.inf, rounded, torch.nan)
    return torch.add(rounded, scaled, alpha=0)  # inf * 0 is NaN; one pass over the operand


def dot(a: Tensor, b: Tensor, of_a: str, of_b: str) -> Tensor:
    """a @ b of fp32 values that are rounded to storage types: products are exact, and sums are those of fp32.

    On XLA it is a dot of words of 8 bits with a result in fp32.
    """
    if a.device.type == "xla":
        return torch_privates.xla_dot(narrow(a, of_a), narrow(b, of_b))
    return torch.mm(a, b)


def measure(wide: Tensor, scale: Tensor, rounded: Tensor, fmt: str) -> Tensor:
    """Three numbers about an operand: by what power of two its scale is off, and what part saturated and vanished.

    A power of 1 says that the scale is right. Of zeros it is 0, and of values that are not finite it is infinite. What
    saturated is a part of the sum of squares, what vanished a part of the elements that are not 0.

    Args:
        wide: the operand in fp32.
        scale: what it was multiplied by.
        rounded: the product, rounded.
        fmt: the storage type.
    """
    if not wide.numel():
        return wide.new_zeros(3)
    top = wide.abs().max()
    unit = exponent_of(top).clamp(min=2.0**-126)
    shaped = wide / unit  # up to 2: no square overflows, and that of the largest is no 0
    energy = shaped.square()
    rows = energy.mean()
    right = fitting(shaped, top / unit, exponent_of(rows.sqrt() * 2**0.5), fmt)
    off = (right * scale * unit).clamp(2.0**-120, 2.0**120)
    off = torch.where(rows < torch.inf, torch.where(top > 0, off, 0.0), torch.inf)  # rows is NaN if an element is
    # An element x that saturates at L loses x * x - L * L of the sum of squares: this is the part of its own square.
    beyond = 1 - (largest(fmt) / (wide * scale)).square()
    saturated = (energy * beyond.clamp(min=0)).mean() / rows
    there = wide != 0
    vanished = ((rounded == 0) & there).float().sum() / there.float().sum().clamp(min=1)
    return torch.stack([off, torch.where(saturated > 0, saturated, 0.0), vanished])


def fitting(shaped: Tensor, top: Tensor, rms: Tensor, fmt: str) -> Tensor:
    """The power of two that an operand should be divided by: the nearest to its root mean square, as a rule.

    Where elements would saturate it is the smallest that they fit under, if few others vanish for it: ones beside
    zeros, as in a one-hot batch. Where many would, the outliers saturate.

    Args:
        shaped: the operand, whose largest magnitude `top` is from 1 to 2.
        top: that.
        rms: the power of two nearest to the root mean square.
        fmt: the storage type.
    """
    places = math.floor(math.log2(largest(fmt)))
    least = torch.full_like(top, 2.0**-places)  # of two numbers, `where` would give a tensor of torch's default dtype
    fits = torch.where(top * 2.0**places > largest(fmt), 2 * least, least)
    small = (shaped.abs() <= fits * VANISHING[fmt]) & (shaped != 0)
    crowded = small.float().sum() > CROWDED * (shaped != 0).float().sum()
    return torch.where((top > rms * largest(fmt)) & ~crowded, fits, rms)


def result(x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """The product in the dtype that the model computes in, after the bias was added: rounded once."""
    return (x if bias is None else x + bias.to(torch.float32)).to(dtype)
