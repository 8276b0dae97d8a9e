"""What several files of tests of training script share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from as_written import Written
from foreign import Lion
from models import SHAPES, parameters
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from collage_neuron import STRATEGIES, exact_value

UNIT = {"bf16": 2**-8, "bf16x2": 2**-17, "fp32": 2**-24, "bf16+fp32": 2**-24}

STEPS = 20

LR = 1e-3


class DecaysMatrices(Written):
    """Weight decay for tensors of two and more dimensions only: what it does depends on the shape."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.ndim > 1:
            p.mul_(1 - 0.5 * group["lr"])
        p.add_(g, alpha=-group["lr"])


Make = Callable[[Any], Optimizer]

BETAS = (0.9, 0.99)

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1),
    "adamw_amsgrad": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, amsgrad=True),
    "adamw_maximize": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, maximize=True),
    "adamw_lr_tensor": lambda ps: AdamW(ps, torch.tensor(LR), BETAS, weight_decay=0.1),
    "adamw_foreach": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, fused=True),
    "adam_coupled_decay": lambda ps: Adam(ps, LR, BETAS, weight_decay=0.1),
    "sgd": lambda ps: SGD(ps, LR),
    "sgd_momentum": lambda ps: SGD(ps, LR / 10, momentum=0.9),
    "sgd_nesterov": lambda ps: SGD(ps, LR / 10, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": lambda ps: SGD(ps, LR, momentum=0.9, dampening=0.9, weight_decay=0.1, maximize=True),
    "lion": lambda ps: Lion(ps, LR),
    "decays_matrices": lambda ps: DecaysMatrices(ps, LR),
}


def twins(shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """fp32 parameters to compile an optimizer over, and float64 ones that hold the same numbers."""
    params = parameters(0, shapes)
    return params, [nn.Parameter(p.detach().double()) for p in params]


def copy_gradients(source: Sequence[nn.Parameter], target: Sequence[nn.Parameter]) -> None:
    for a, b in zip(source, target, strict=True):
        b.grad = None if a.grad is None else a.grad.to(b.dtype)


def assert_near(optimizer: Optimizer, params: list[nn.Parameter], oracle: list[nn.Parameter], moved: float) -> None:
    """Every parameter is where float64 is, up to what its formats can lose in STEPS steps that moved it by `moved`."""
    error = max(
        float((exact_value(optimizer, p).double() - q.detach()).abs().max())
        for p, q in zip(params, oracle, strict=True)
    )
    bound = error_bound(optimizer, oracle, moved)
    assert error <= bound, f"off by {error:.3g}, may be off by {bound:.3g}"


def error_bound(optimizer: Optimizer, oracle: list[nn.Parameter], moved: float) -> float:
    """Storing the parameter STEPS + 1 times, and a relative error of each step.

    That is 12 errors of a first moment with decay 0.9 (10 of its own, two of the operations), and 50 of a second one
    with decay 0.99, which the square root halves.
    """
    s = STRATEGIES[optimizer.param_groups[0]["collage_strategy"]]
    largest = max(float(q.detach().abs().max()) for q in oracle)
    return (STEPS + 1) * UNIT[s.param] * largest + moved * (12 * UNIT[s.state] + 50 * UNIT[s.slow])
