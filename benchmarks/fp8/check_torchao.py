"""Compares the layers of `amax` with torchao's, bit for bit: outputs, and gradients of inputs and weights."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from fp8.just_in_time import convert


def differences_from_torchao() -> int:
    """How many elements of outputs and gradients of a layer differ from torchao's; ImportError without torchao."""
    torchao: Any = importlib.import_module("torchao.float8")  # of the group `peers`
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48, bias=False)).bfloat16()
    theirs = nn.Sequential(nn.Linear(32, 48, bias=False)).bfloat16()
    theirs.load_state_dict(plain.state_dict())
    theirs = torchao.convert_to_float8_training(theirs, config=torchao.Float8LinearConfig(emulate=True))
    convert(plain, frozenset())
    found = [_outcome(model) for model in (plain, theirs)]
    return sum(int((a != b).sum()) for a, b in zip(*found, strict=True))


def _outcome(model: nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).bfloat16().requires_grad_()
    y = model(x)
    y.backward(torch.randn(64, 48, generator=generator).bfloat16() * 1e-3)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
