"""An ordinary training script still works: schedulers, loops, and that the steps are the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import backward, bits, gpt, mlp, parameters, set_gradients, train
from scripts_in_float64 import LR, OPTIMIZERS, STEPS, Make, assert_near, copy_gradients, twins
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

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


@pytest.mark.sampled(of=4, each=False)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pure_bf16_is_not_within_the_bound_of_plus(name: str) -> None:
    """The bound can be missed."""
    optimizer, params, oracle, moved = run_both(OPTIMIZERS[name], "bf16")
    optimizer.param_groups[0]["collage_strategy"] = "plus"
    with pytest.raises(AssertionError, match="may be off by"):
        assert_near(optimizer, params, oracle, moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_states_is_one_rounding_to_bf16_from_float64_in_every_step(name: str) -> None:
    """The oracle starts each step from the stored bf16 parameter; both sides' states follow the gradients alone."""
    params, oracle = twins()
    optimizer = collage_neuron.compile(OPTIMIZERS[name](params), strategy="fp32_states")
    reference = OPTIMIZERS[name](oracle)
    for i in range(STEPS):
        for p, q in zip(params, oracle, strict=True):
            q.data.copy_(p.detach())
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
        for p, q in zip(params, oracle, strict=True):
            # 2**-8 for the rounding; the fp32 operations before it are a few 2**-24 of a parameter below 4.
            assert ((p.double() - q).abs() <= 2**-8 * q.abs() + 8 * 2**-24 * 4).all()
            assert_states_near(optimizer.state[p], reference.state[q], 64 * 2**-24)


def assert_states_near(state: dict[str, Any], oracle: dict[str, Any], relative: float) -> None:
    for key, value in oracle.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            error = (state[key].double() - value).abs().max()
            assert error <= relative * value.abs().max(), key


# --- schedulers and the loops of training scripts around a compiled optimizer -----------------------------------------

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
