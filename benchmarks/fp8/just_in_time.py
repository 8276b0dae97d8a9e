"""Linear layers in fp8 with scales from the largest magnitude of each operand in each step: the recipe of torchao.

Written from torchao 0.14's `Float8Linear` with its default, tensorwise and dynamic configuration, in its emulated form:
scales are the largest number of the type over the largest magnitude (not powers of two), e4m3fn up to 448 for inputs
and weights, e5m2 for gradients, casts saturate, and products are in fp32 and rounded to bf16 once. `python
benchmarks/fp8 --check-torchao` compares the two bit for bit, where torchao is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12
"""torchao's bound below a largest magnitude."""


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The fp32 values that `x` has after it was scaled, rounded to 8 bits, and scaled back."""
    largest = torch.finfo(dtype).max
    scale = (largest / x.abs().amax().double().clamp(min=LEAST)).float()
    scaled = (x.float() * scale).clamp(-largest, largest)
    return scaled.to(dtype).float() / scale


class JustInTime(torch.autograd.Function):
    """x @ w.t() + bias, forward and backward in fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        flat = cast(x.flatten(0, -2), FORWARD)
        weight = cast(w, FORWARD)
        ctx.save_for_backward(flat, weight)
        ctx.has_bias = bias is not None
        y = (flat @ weight.t()).to(x.dtype)
        shaped: Tensor = (y if bias is None else y + bias).unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        flat, weight = ctx.saved_tensors
        whole = grad.flatten(0, -2)
        g = cast(whole, GRADIENT)
        of_x = (g @ weight).to(grad.dtype).unflatten(0, grad.shape[:-1])
        return of_x, (g.t() @ flat).to(grad.dtype), whole.sum(0) if ctx.has_bias else None


def convert(model: nn.Module, keep: frozenset[str]) -> int:
    """Makes linear layers but those in `keep` compute so, in place; returns the number of reductions in a step."""
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in keep]
    for layer in layers:
        _put(layer)
    return 3 * len(layers)


def _put(layer: Any) -> None:
    apply: Any = JustInTime.apply
    layer.forward = lambda x: apply(x, layer.weight, layer.bias)
