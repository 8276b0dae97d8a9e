"""FlashAdamW's arithmetic in plain PyTorch, written from the kernels of flashoptim 0.1.4, which need a CUDA device.

A weight is a bf16 word and an int8 count of 1/127 of half an ulp of it. Moments are bf16, or 8-bit codes of groups of
32 with an fp16 maximum each: softsign companding for the first moment, the square root for the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

GROUP = 32
Words = tuple[Tensor, ...]


def half_ulp(x: Tensor) -> Tensor:
    """Half of the distance between a bf16 number and its neighbour farther from zero, in fp32."""
    exponent = (x.view(torch.int16).int() >> 7 & 0xFF).clamp_min(1)
    return torch.ldexp(torch.ones((), dtype=torch.float64), exponent - (127 + 8)).float()


def encode_weight(x: Tensor) -> Words:
    """The bf16 word and the int8 correction of an fp32 value; halves of a unit are rounded away from zero."""
    word = x.bfloat16()
    units = ((x - word.float()) / half_ulp(word)).clamp(-1, 1) * 127
    return word, (units.sign() * (units.abs() + 0.5).floor()).to(torch.int8)


def decode_weight(word: Tensor, correction: Tensor) -> Tensor:
    return word.float() + correction.float() / 127 * half_ulp(word)


def encode_first(x: Tensor) -> Words:
    """int8 codes 127 * 2 y / (1 + |y|), where y = x / largest |x| of the group."""
    groups, largest = _scaled(x)
    codes = 127 * 2 * groups / (1 + groups.abs())
    return (codes + 0.5).floor().to(torch.int8), largest.half()


def decode_first(codes: Tensor, largest: Tensor) -> Tensor:
    y = codes.float() / 127
    return (y / (2 - y.abs()) * largest.float()).flatten()


def encode_second(x: Tensor) -> Words:
    """uint8 codes 255 * sqrt(x) / largest sqrt(x) of the group."""
    groups, largest = _scaled(x.sqrt())
    return (255 * groups + 0.5).floor().to(torch.uint8), largest.half()


def decode_second(codes: Tensor, largest: Tensor) -> Tensor:
    return (codes.float() / 255 * largest.float()).square().flatten()


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.reshape(-1, GROUP)
    largest = groups.abs().amax(1, keepdim=True).clamp_min(1e-12)
    return groups / largest, largest


class FlashAdamW(Optimizer):
    """AdamW on those words; `quantize` selects 8-bit moments. The size of a parameter is a multiple of 32."""

    def __init__(self, params: list[Parameter], quantize: bool, **options: Any) -> None:
        super().__init__(params, {"quantize": quantize, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a loss
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group)

    def _update(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        zero, quantize = torch.zeros(p.numel()), group["quantize"]
        if not state:
            state.update(t=0, correction=torch.zeros_like(p, dtype=torch.int8))
            state["m"] = encode_first(zero) if quantize else (zero.bfloat16(),)
            state["v"] = encode_second(zero) if quantize else (zero.bfloat16(),)
        assert p.grad is not None
        g, (beta1, beta2) = p.grad.float().flatten(), group["betas"]
        state["t"] += 1
        m = (decode_first(*state["m"]) if quantize else state["m"][0].float()) * beta1 + g * (1 - beta1)
        v = (decode_second(*state["v"]) if quantize else state["v"][0].float()) * beta2 + g * g * (1 - beta2)
        denominator = (v / (1 - beta2 ** state["t"])).sqrt() + group["eps"]
        step = group["lr"] * (m / (1 - beta1 ** state["t"])) / denominator
        theta = decode_weight(p, state["correction"]) * (1 - group["lr"] * group["weight_decay"]) - step.view_as(p)
        state["m"] = encode_first(m) if quantize else (m.bfloat16(),)
        state["v"] = encode_second(v) if quantize else (v.bfloat16(),)
        word, state["correction"] = encode_weight(theta)
        p.copy_(word)
