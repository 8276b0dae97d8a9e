"""What several files of tests of loading share."""

from __future__ import annotations

import copy
from typing import Any

from models import mlp, train
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.numerics.strategies import DEFAULT


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def compiled(strategy: str = DEFAULT, steps: int = 2, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = mlp(seed)
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy=strategy)
    train(model, optimizer, range(steps))
    return model, optimizer


def ours(strategy: str = DEFAULT) -> dict[str, Any]:
    return copy.deepcopy(compiled(strategy)[1].state_dict())
