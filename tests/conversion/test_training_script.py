"""An ordinary training script still works: what it does around `step`, and that the steps are the optimizer's own.

The oracle of every trajectory is the same torch optimizer in float64, given the same gradients. What may differ is
written from the formats: a stored number is off by at most u = 2**-8 of itself in bf16, 2**-17 as hi + lo, 2**-24 in
fp32, and an average that forgets with a decay d keeps at most 1 / (1 - d) such errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    bits,
    parameters,
    set_gradients,
)
from scripts_in_float64 import (
    LR,
    OPTIMIZERS,
    STEPS,
    Make,
    assert_near,
    copy_gradients,
    twins,
)
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.states.store import read_exact

"""Half an ulp of each format, relative to the number."""

"""A step far below half an ulp of a bf16 parameter: pure bf16 loses it."""


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


@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_nesterov", "lion"])
def test_the_states_of_full_are_those_of_float64(name: str) -> None:
    """At most 1 / (1 - 0.99) errors of 2**-17 each."""
    params, oracle = twins()
    optimizer, reference = collage_neuron.compile(OPTIMIZERS[name](params), strategy="full"), OPTIMIZERS[name](oracle)
    for i in range(STEPS):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    for p, q in zip(params, oracle, strict=True):
        names = [k for k, v in reference.state[q].items() if isinstance(v, torch.Tensor) and v.dim() > 0]
        exact = {k: read_exact(p, optimizer.state[p], k) for k in names}
        assert names
        assert_states_near(exact, {k: reference.state[q][k] for k in names}, 100 * 2**-17)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_tracks_torch_in_fp32_within_ulps(name: str) -> None:
    """Four roundings of the parameter a step may fall otherwise than torch's: 2**-24 of its magnitude each."""
    params, ordinary = parameters(), parameters()
    optimizer, reference = collage_neuron.compile(OPTIMIZERS[name](params), strategy="fp32"), OPTIMIZERS[name](ordinary)
    for i in range(STEPS):
        set_gradients(ordinary, i)
        copy_gradients(ordinary, params)
        optimizer.step()
        reference.step()
        for p, q in zip(params, ordinary, strict=True):
            ulps = (exact_value(optimizer, p).double() - q.double()).abs() / (2**-23 * q.double().abs().clamp(min=1))
            assert ulps.max() <= 2 * (i + 1)
            assert torch.equal(p, exact_value(optimizer, p).bfloat16())


@pytest.mark.parametrize(
    "strategy",
    ["bf16", "light", "plus", "full", "fp32", "fp32_states"],
)
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
def test_a_parameter_without_dimensions_is_one_like_the_others(name: str, strategy: str) -> None:
    """A temperature or a scale: bit for bit the same number as in a tensor of one dimension."""
    found = []
    for shape in ((), (1,)):
        p = nn.Parameter(torch.full(shape, 1.2345))
        optimizer = collage_neuron.compile(OPTIMIZERS[name]([p]), strategy=strategy)
        for grad in (0.5, 0.25, 1.5):
            p.grad = torch.full_like(p, grad)
            optimizer.step()
        found.append([bits(t).flatten() for t in (p, *optimizer.state[p].values()) if isinstance(t, torch.Tensor)])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_parameter_without_dimensions_in_fp32_is_updated_by_a_compiled_class() -> None:
    p, q = (nn.Parameter(torch.tensor(1.2345)) for _ in range(2))
    with pytest.warns(UserWarning, match="float32"):
        optimizer = collage_neuron.compile(AdamW)([p], lr=1e-2)
    reference = AdamW([q], lr=1e-2)
    for grad in (0.5, 0.25, 1.5):
        p.grad, q.grad = torch.tensor(grad), torch.tensor(grad)
        optimizer.step()
        reference.step()
    assert abs(p.item() - q.item()) <= 3 * 2**-23
