"""Low words that `compile` made of fp32 weights, until the first step: weights loaded in between make them stale."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

_versions: WeakKeyDictionary[Optimizer, dict[torch.Tensor, tuple[int, torch.Tensor]]] = WeakKeyDictionary()
"""For each optimizer that has not stepped: its split parameters, their versions, and their low words."""


def remember(optimizer: Optimizer, p: torch.Tensor) -> None:
    """Notes that the low word of `p` belongs to what `p` holds now."""
    low = optimizer.state[p].get("param_lo")
    if low is not None:
        _versions.setdefault(optimizer, {})[p] = (p._version, low)


def drop_stale(optimizer: Optimizer) -> None:
    """Before the first step: zeroes low words of parameters written since, unless a checkpoint brought its own."""
    for p, (version, low) in _versions.pop(optimizer, {}).items():
        if p._version != version and optimizer.state[p].get("param_lo") is low:
            low.zero_()
