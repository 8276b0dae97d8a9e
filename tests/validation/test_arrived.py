"""Steps of the size of the gradient that a low word loses are warned of; samples that compute with sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp, step_with
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, OneCycleLR

import collage_neuron
from collage_neuron import SmallSteps
from collage_neuron.cli import builtin_gpt

pytestmark = pytest.mark.validated


# --- steps of the size of the gradient that a low word loses are warned of, and those of healthy runs are not ---------

# Warnings are errors here.

Gradient = Callable[[Tensor], Tensor]
SHORT = ("split323", "split322", "split312", "split311", "plus", "light")
SMALL: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=1e-6),
    "momentum": lambda ps: SGD(ps, lr=1e-7, momentum=0.9, nesterov=True),
    "ASGD": lambda ps: ASGD(ps, lr=1e-6),
    "a rate in a tensor": lambda ps: SGD(ps, lr=torch.tensor(1e-6)),
}
SAID = r"param_groups\[0\]: strategy='\w+' keeps parameters as bf16(\+int8|x2), and \d+% of the steps .* 'split433'"


def parameters(size: float = 1.0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(size * torch.randn(64, 64, generator=g)), nn.Parameter(torch.zeros(64))]


def take(optimizer: Optimizer, steps: int, gradient: Gradient = torch.randn_like, scheduler: Any = None) -> None:
    for _ in range(steps):
        step_with(optimizer, gradient)
        if scheduler is not None:
            scheduler.step()


def compiled(optimizer: Optimizer, strategy: str = "split322", **settings: Any) -> Optimizer:
    return collage_neuron.compile(optimizer, strategy=strategy, verbose=False, **settings)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("strategy", SHORT)
def test_steps_that_are_lost_are_warned_of_once(name: str, strategy: str) -> None:
    torch.manual_seed(0)
    optimizer = compiled(SMALL[name](parameters()), strategy)
    take(optimizer, 15)
    with pytest.warns(SmallSteps, match=SAID):
        take(optimizer, 1)
    take(optimizer, 20)


def test_it_is_true() -> None:
    """After 200 steps in one direction, a 24-bit parameter has gone less than a quarter of the way; one of 32 all."""
    gone = {}
    for strategy in ("split322", "split422"):
        params = parameters()
        start, optimizer = params[0].detach().clone(), compiled(SGD(params, lr=1e-6), strategy, validate="off")
        take(optimizer, 200, torch.ones_like)
        gone[strategy] = float((start - collage_neuron.exact_value(optimizer, params[0])).mean()) / 2e-4
    assert gone["split322"] < 0.25
    assert 0.99 < gone["split422"] < 1.01


def test_a_budget_that_leaves_24_bits_is_warned_of() -> None:
    optimizer = collage_neuron.compile(SGD(parameters(), lr=1e-6), bytes=5, verbose=False)
    with pytest.warns(SmallSteps, match=SAID):
        take(optimizer, 16)


HEALTHY: dict[str, tuple[float, Gradient]] = {
    "large steps": (1e-1, lambda p: 1e-3 * torch.randn_like(p)),
    "no gradients": (1e-1, torch.zeros_like),
    "a rate of 0": (0.0, torch.randn_like),
    "gradients of a few rows": (1e-1, lambda p: 1e-2 * torch.randn_like(p) * (torch.rand_like(p[..., :1]) < 0.1)),
}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", HEALTHY)
def test_these_are_not_warned_of(name: str, momentum: float) -> None:
    rate, gradient = HEALTHY[name]
    take(compiled(SGD(parameters(0.02), lr=rate, momentum=momentum)), 40, gradient)


@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_trained_models_are_not_warned_of(model: str, momentum: float) -> None:
    torch.manual_seed(0)
    if model == "gpt":
        module, _, loss = builtin_gpt.make()
    else:
        module = mlp()
        data = torch.randn(16, next(module.parameters()).shape[1]).bfloat16()
        loss = lambda: module(data).float().square().mean()  # noqa: E731
    optimizer: Any = SGD(module.parameters(), lr=0.1 * (1 - momentum), momentum=momentum)
    module, optimizer = collage_neuron.compile(module, optimizer, strategy="split322", verbose=False)
    for _ in range(64):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "constant": lambda o: ConstantLR(o, factor=1e-7, total_iters=100),
    "linear": lambda o: LinearLR(o, start_factor=1e-7, total_iters=200),
    "one cycle": lambda o: OneCycleLR(o, max_lr=1e-1, total_steps=200, div_factor=1e6),
    "by a function": lambda o: LambdaLR(o, lambda i: min(i / 200, 1.0) ** 4),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rate_that_warms_up_is_not_warned_of(name: str) -> None:
    optimizer = SGD(parameters(), lr=1e-1, momentum=0.5)
    scheduler = SCHEDULES[name](optimizer)
    take(compiled(optimizer), 150, scheduler=scheduler)


def test_a_rate_that_is_raised_by_hand_is_not_warned_of_until_it_stays() -> None:
    optimizer = compiled(SGD(parameters(), lr=1e-9))
    for i in range(80):
        optimizer.param_groups[0]["lr"] = 1e-9 * (i + 1)
        take(optimizer, 1)
    with pytest.warns(SmallSteps, match=SAID):
        take(optimizer, 512)
