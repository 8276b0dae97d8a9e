"""An ordinary training script still works: schedulers, loops, and that the steps are the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from models import backward, gpt, mlp, parameters, set_gradients, train
from scripts_in_float64 import LR, OPTIMIZERS, STEPS, Make, assert_near, copy_gradients, twins
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import collage_neuron

# --- an ordinary training script still works: what it does around `step`, and that the steps are the optimizer's own --

# The oracle of every trajectory is the same torch optimizer in float64, given the same gradients. What may differ is
# written from the formats: a stored number is off by at most u = 2**-8 of itself in bf16, 2**-17 as hi + lo, 2**-24 in
# fp32, and an average that forgets with a decay d keeps at most 1 / (1 - d) such errors.


def run_both(make: Make, strategy: str, steps: int = STEPS, **settings: Any) -> tuple[Optimizer, Any, Any, float]:
    params, oracle = twins()
    start = [q.detach().clone() for q in oracle]
    optimizer = collage_neuron.compile(make(params), strategy=strategy, **settings)
    reference = make(oracle)
    for i in range(steps):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    moved = max(float((q.detach() - s).abs().max()) for q, s in zip(oracle, start, strict=True))
    return optimizer, params, oracle, moved


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trajectory_is_that_of_the_optimizer_in_float64(name: str, strategy: str) -> None:
    optimizer, params, oracle, moved = run_both(OPTIMIZERS[name], strategy)
    assert moved > 0.9 * LR * STEPS / 10
    assert_near(optimizer, params, oracle, moved)


# --- schedulers and the loops of training scripts around a compiled optimizer -----------------------------------------


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
