"""An ordinary training script still works: what it does around `step`, and that the steps are the optimizer's own.

The oracle of every trajectory is the same torch optimizer in float64, given the same gradients. What may differ is
written from the formats: a stored number is off by at most u = 2**-8 of itself in bf16, 2**-17 as hi + lo, 2**-24 in
fp32, and an average that forgets with a decay d keeps at most 1 / (1 - d) such errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import set_gradients
from scripts_in_float64 import LR, OPTIMIZERS, STEPS, Make, assert_near, copy_gradients, twins
from torch.optim import Optimizer

import collage_neuron


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
