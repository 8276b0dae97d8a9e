"""What several files of tests of compile share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron


def adamw(model: nn.Module, lr: float = 1e-2) -> AdamW:
    return AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def by_both(model: nn.Module, **settings: Any) -> Optimizer:
    return collage_neuron.compile(model, adamw(model), **settings)[1]


def by_optimizer(model: nn.Module, **settings: Any) -> Optimizer:
    return collage_neuron.compile(adamw(model), **settings)


def by_model(model: nn.Module, **settings: Any) -> Optimizer:
    """The optimizer is built afterwards, the ordinary way, and is compiled when it first steps."""
    return adamw(collage_neuron.compile(model, **settings))


FORMS: dict[str, Callable[..., Optimizer]] = {
    "(model, optimizer)": by_both,
    "(optimizer)": by_optimizer,
    "(model)": by_model,
}


def states(optimizer: Optimizer) -> list[set[str]]:
    """Names of the states of the first parameter of each group."""
    return [set(optimizer.state[group["params"][0]]) for group in optimizer.param_groups]
