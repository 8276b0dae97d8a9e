"""Runs of an optimizer on gradients under which a slow state needs more than one bf16 word."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron

STEPS = 300


def start() -> Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(-1)).bfloat16()


def gradient(step: int) -> Tensor:
    """Large for twenty steps, then smaller, so that a second moment has to come down."""
    noise = torch.randn(24, generator=torch.Generator().manual_seed(step))
    return ((0.5 + noise) * (1.0 if step < 20 else 0.25)).bfloat16()


def stepped(optimizer: Optimizer, p: torch.nn.Parameter, steps: int = STEPS) -> None:
    for step in range(steps):
        p.grad = gradient(step).to(p.dtype)
        optimizer.step()


def error(make: Any, strategy: Any, steps: int = STEPS) -> float:
    """How far the parameter is from its run in float64, as a fraction of the distance that it moved; the worst."""
    p, exact = torch.nn.Parameter(start()), torch.nn.Parameter(start().double())
    optimizer = collage_neuron.compile(make([p]), strategy=strategy)
    stepped(optimizer, p, steps)
    stepped(make([exact]), exact, steps)
    moved = (exact.detach() - start().double()).abs()
    return float(((collage_neuron.exact_value(optimizer, p).double() - exact.detach()).abs() / moved.median()).max())
