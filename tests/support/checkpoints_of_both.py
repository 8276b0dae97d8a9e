"""What several files of tests of checkpoints share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from models import differences, mlp, snapshot, train
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import collage_neuron


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True)


def in_torch(steps: int = 3, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """A model that torch trained in fp32, with its optimizer."""
    model = mlp(seed)
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def in_ours(strategy: str = "plus", steps: int = 3, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = mlp(seed)
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy=strategy)
    train(model, optimizer, range(steps))
    return model, optimizer


def saved_from(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


def are_alike_after(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer], steps: range) -> None:
    """Two runs go on, and are then the same bits."""
    for run in (one, other):
        train(*run, steps)
    assert differences(snapshot(one[1]), snapshot(other[1])) == []


# max_exp_avg_sq moves in steps that bf16 can hold: `plus` does not give it a low word.
STORED = {
    "bf16": ("bf16", "bf16", "bf16"),
    "light": ("bf16x2", "bf16", "bf16"),
    "plus": ("bf16x2", "bf16", "bf16x2"),
    "full": ("bf16x2", "bf16x2", "bf16x2"),
    "fp32": ("bf16+fp32", "fp32", "fp32"),
    "fp32_states": ("bf16", "fp32", "fp32"),
}

BEFORE, AFTER = 20, 100


def bound(strategy: str, largest: float, moved: float) -> float:
    """How far AFTER steps may lead from where float64 goes, from the same checkpoint.

    A parameter is stored AFTER times and once when it is loaded: each rounds it by its unit. A first moment keeps 10
    of the errors of storing it (1 / (1 - 0.9)), a second one 100, of which the square root leaves half; gradients lie
    in [1, 2), so that moments differ by less than a factor of 2 from what they were when the errors were made. In fp32
    each step rounds the parameter three times (the scalar 1 - lr * wd, the product, the sum) and the step at most 16.
    """
    param, first, second = ({"fp32": 2**-24, "bf16+fp32": 2**-24} | UNIT_OF)[STORED[strategy][0]], *moments(strategy)
    stored = (AFTER + 1) * param * largest + moved * (2 * 10 * first + 2 * 50 * second)
    return stored + 2**-24 * (3 * AFTER * largest + 16 * moved)


UNIT_OF = {"bf16": 2**-8, "bf16x2": 2**-17}


def moments(strategy: str) -> tuple[float, float]:
    first, second = (({"fp32": 2**-24} | UNIT_OF)[fmt] for fmt in STORED[strategy][1:])
    return first, second


def farthest(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
