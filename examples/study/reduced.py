"""Formats with a shorter mantissa, E8M7 (bf16) down to E8M1, for the inputs of matrix multiplications.

Lee et al., "To FP8 and Back Again" (2024) zero mantissa bits with a mask, which is rounding toward zero and hence
biased; rounding to nearest and stochastic rounding tell how much of the effect is the bias.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FP32_MANTISSA = 23

Rounding = Callable[[Tensor, int], Tensor]
"""Bits of fp32 numbers (int32) -> what is added to them before the lowest `dropped` are cut off."""


def _truncate(bits: Tensor, dropped: int) -> Tensor:
    return torch.zeros_like(bits)


def _nearest(bits: Tensor, dropped: int) -> Tensor:
    """Half an ulp, less one where the last kept bit is even: a tie then stays below the carry."""
    odd = (bits >> dropped) & 1
    return (1 << (dropped - 1)) - 1 + odd


def _stochastic(bits: Tensor, dropped: int) -> Tensor:
    return torch.randint(1 << dropped, bits.shape, dtype=torch.int32)


ROUNDINGS: dict[str, Rounding] = {"truncation": _truncate, "nearest": _nearest, "stochastic": _stochastic}


def reduce_mantissa(x: Tensor, mantissa: int, rounding: str) -> Tensor:
    """The fp32 tensor x rounded to numbers of `mantissa` explicit bits (0 to 22) and the exponents of fp32.

    The magnitude of a float grows with its bit pattern, so that a carry out of the mantissa lands in the exponent.
    Infinities stay, NaN stays NaN; a number that rounds beyond the largest becomes infinite. `stochastic` draws from
    torch's global generator.
    """
    dropped = FP32_MANTISSA - mantissa
    bits = x.contiguous().view(torch.int32)
    moved = bits + ROUNDINGS[rounding](bits, dropped)
    kept = (moved >> dropped << dropped).view(torch.float32)
    return torch.where(x.isfinite(), kept, x)


class _Reduce(torch.autograd.Function):
    """Rounds a value on its way forward, or the gradient on its way back; the other way passes untouched."""

    @staticmethod
    def forward(x: Tensor, mantissa: int, rounding: str, where: str) -> Tensor:
        return reduce_mantissa(x, mantissa, rounding) if where == "value" else x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.format = inputs[1:]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mantissa, rounding, where = ctx.format
        (g,) = gradients
        return reduce_mantissa(g, mantissa, rounding) if where == "gradient" else g, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *fmt: Any) -> Any:
        """Elementwise: what is batched is rounded as it is."""
        return _reduced(x, *fmt), in_dims[0]


def _reduced(x: Tensor, mantissa: int, rounding: str, where: str) -> Tensor:
    result: Tensor = _Reduce.apply(x, mantissa, rounding, where)  # type: ignore[no-untyped-call]  # torch's
    return result


class ReducedLinear(nn.Linear):
    """A linear layer all of whose matrix multiplications, forward and backward, read rounded numbers."""

    format: tuple[int, str]

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(self._rounded(x), self._rounded(self.weight), self.bias)
        return _reduced(y, *self.format, "gradient")

    def _rounded(self, x: Tensor) -> Tensor:
        return _reduced(x, *self.format, "value")


def reduce_linears(model: nn.Module, mantissa: int, rounding: str) -> None:
    """Makes every linear layer of `model` a ReducedLinear, in place."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = ReducedLinear
            module.format = (mantissa, rounding)  # type: ignore[assignment]  # of the new class
