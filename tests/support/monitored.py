"""A small model trained under a monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from models import gpt, train
from torch import nn

import collage_neuron
from collage_neuron import Monitor


def trained(
    strategy: str = "plus", arithmetic: str = "fp32", steps: int = 3, device: str | torch.device = "cpu",
    make: Callable[[], nn.Module] = gpt, **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Monitor]:  # fmt: skip
    model: nn.Module = make().to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, arithmetic=arithmetic)
    monitor = collage_neuron.monitor(optimizer, model, **options)
    for seed in range(steps):
        train(model, optimizer, [seed])
        sync(device)
    return model, optimizer, monitor


def sync(device: str | torch.device) -> None:
    if str(device) != "cpu":
        import torch_xla

        torch_xla.sync()
