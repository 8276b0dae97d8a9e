"""Schedulers and the loops of training scripts around a compiled optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import backward, bits, differences, gpt, mlp, parameters, set_gradients, snapshot, train
from scripts_in_float64 import LR, OPTIMIZERS, STEPS, assert_near, copy_gradients, twins
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

import collage_neuron

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda i: min(1, i / 3)),  # through 0 and the integer 1
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.01, total_steps=12),  # changes betas or momentum too
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("after", [False, True], ids=["before compile", "after compile"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["adamw", "adamw_lr_tensor", "sgd_momentum"])
def test_a_scheduler_drives_a_compiled_optimizer(name: str, schedule: str, after: bool) -> None:
    """Without the warning that the scheduler saw no step, which would be an error here."""
    params, oracle = twins()
    base, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](oracle)
    early = None if after else SCHEDULES[schedule](base)
    optimizer = collage_neuron.compile(base, strategy="full")
    scheduler, other = early or SCHEDULES[schedule](optimizer), SCHEDULES[schedule](reference)
    for i in range(10):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
        for s in (scheduler, other):
            s.step() if isinstance(s, LRScheduler) and not isinstance(s, ReduceLROnPlateau) else s.step(1.0)
        assert scheduled(optimizer) == scheduled(reference)
    assert_near(optimizer, params, oracle, moved=10 * 0.01 * 2)


def scheduled(optimizer: Optimizer) -> list[Any]:
    """What schedulers write."""
    group = optimizer.param_groups[0]
    return [float(group["lr"]), group.get("betas"), group.get("momentum")]


def test_a_scheduler_attached_before_compiling_sees_that_no_step_was_taken() -> None:
    """The warning is still given where it is due."""
    base = AdamW(parameters())
    scheduler = LambdaLR(base, lambda i: 1.0)
    optimizer = collage_neuron.compile(base)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()


@pytest.mark.parametrize("strategy", ["light", "plus", "full", "fp32"])
@pytest.mark.parametrize("make", [mlp, gpt])
def test_a_model_trains_like_in_fp32(make: Callable[[], nn.Module], strategy: str) -> None:
    """One fixed batch: the loss falls as it does in fp32, up to the bf16 forward's rounding of 2**-8."""
    losses = []
    for compiled in (False, True):
        model = make()
        optimizer = AdamW(model.parameters(), lr=3e-3)
        if compiled:
            collage_neuron.compile(model, optimizer, strategy=strategy)
        train(model, optimizer, [0] * 30)
        losses.append(float(backward(model, 0)))
    first = float(backward(make(), 0))
    assert losses[0] < 0.9 * first
    assert abs(losses[1] - losses[0]) <= 0.1 * (first - losses[0])


def test_zero_grad_to_none_lets_a_parameter_rest_and_to_zero_does_not() -> None:
    params, oracle = twins()
    optimizer, reference = (
        collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy="full"),
        OPTIMIZERS["adamw"](oracle),
    )
    set_gradients(params, 0)
    copy_gradients(params, oracle)
    for set_to_none in (True, False, False, True, False):
        for o in (optimizer, reference):
            o.step()
        before = [bits(p) for p in params]
        for o in (optimizer, reference):
            o.zero_grad(set_to_none=set_to_none)
            o.step()
        rested = all(torch.equal(bits(p), b) for p, b in zip(params, before, strict=True))
        lows = [bits(optimizer.state[p]["param_lo"]) for p in params]
        assert all(p.grad is None for p in params) == set_to_none
        if set_to_none:
            assert rested
            set_gradients(params, 0)
            copy_gradients(params, oracle)
        assert len(lows) == len(params)
    steps = [[float(o.state[p]["step"]) for p in ps] for o, ps in ((optimizer, params), (reference, oracle))]
    assert steps[0] == steps[1]
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned() -> None:
    model = mlp()
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    train(twin_model, twin, [0])
    assert calls == [True]
    assert loss == backward(mlp().bfloat16(), 0)
    assert differences(snapshot(optimizer), snapshot(twin)) == []
