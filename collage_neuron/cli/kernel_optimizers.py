"""The optimizers whose kernels `python -m collage_neuron kernels` generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import AdamW, Optimizer

from collage_neuron.numerics.strategies import StrategyLike

Params = list[torch.nn.Parameter]


class Lion(Optimizer):
    """Lion, written as a user would: the sign of an average of gradients (Chen et al., 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Entry(NamedTuple):
    """A kernel: an optimizer, and how it is compiled."""

    make: Callable[[Params], Optimizer]
    strategy: StrategyLike
    arithmetic: str = "fp32"


def adamw(ps: Params) -> Optimizer:
    """AdamW with decay, so that its kernel has that too."""
    return AdamW(ps, weight_decay=0.1)
