"""A step count in bf16 or fp16 counts in fp32; two states that share one, and groups that compute, are rejected."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value


def _optimizer(**kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.ones(8).bfloat16()) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, collage_neuron.compile(torch.optim.AdamW(params, lr=0.1), strategy="plus", **kwargs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_count_that_two_states_share_is_rejected(backend: str) -> None:
    params, optimizer = _optimizer(backend=backend)
    for _ in range(3):
        optimizer.step()
    optimizer.state[params[2]]["step"] = optimizer.state[params[0]]["step"]
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"hold one tensor as 'step'.*nothing was updated"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    assert float(optimizer.state[params[0]]["step"]) == 3
    optimizer.state[params[2]]["step"] = optimizer.state[params[2]]["step"].clone()
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [4, 4, 4]


def test_a_group_that_computes_its_settings_is_rejected() -> None:
    class Doubling(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return 2 * super().__getitem__(key) if key == "lr" else super().__getitem__(key)

    params, optimizer = _optimizer()
    optimizer.step()
    optimizer.param_groups[0] = Doubling(optimizer.param_groups[0])
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"param_groups\[0\] is a Doubling that computes"):
        optimizer.step()
    assert torch.equal(params[0], before)


STEPS = 270


def new() -> tuple[nn.Parameter, Optimizer]:
    p = nn.Parameter(torch.linspace(-1, 1, 64))
    return p, AdamW([p], lr=1e-3, betas=(0.9, 0.9999), weight_decay=0.0)


def train(p: nn.Parameter, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        p.grad = torch.randn(64, generator=torch.Generator().manual_seed(i)).to(p.dtype)
        optimizer.step()


def narrowed(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for of_one in state["state"].values():
        of_one["step"] = of_one["step"].to(dtype)
    return state


def loaded(dtype: torch.dtype, how: str, at: int, strategy: str) -> tuple[nn.Parameter, Optimizer]:
    """A run whose count was narrow, and `at`."""
    p, optimizer = new()
    if how == "before compile":
        train(p, optimizer, range(2))
        optimizer.state[p]["step"].fill_(at)
        optimizer.load_state_dict(narrowed(optimizer.state_dict(), dtype))
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
        return p, collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    train(p, optimizer, range(2))
    optimizer.state[p]["step"].fill_(at)
    if how == "assigned":
        optimizer.state[p]["step"] = optimizer.state[p]["step"].to(dtype)
    else:
        optimizer.load_state_dict(narrowed(optimizer.state_dict(), dtype))
    return p, optimizer


@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["before compile", "assigned", "loaded"])
def test_a_narrow_count_counts_on_as_in_fp32(how: str, dtype: torch.dtype, strategy: str) -> None:
    narrow, wide = (loaded(d, how, 250, strategy) for d in (dtype, torch.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p, optimizer in (narrow, wide):
            train(p, optimizer, range(250, STEPS))
    (p, optimizer), (q, other) = narrow, wide
    assert optimizer.state[p]["step"].dtype == torch.float32
    assert optimizer.state[p]["step"].item() == STEPS
    assert torch.equal(exact_value(optimizer, p), exact_value(other, q))


@pytest.mark.parametrize("how", ["before compile", "assigned", "loaded"])
def test_a_count_that_may_have_stood_still_is_told(how: str) -> None:
    with pytest.warns(
        UserWarning, match=r"'step' of 1 parameters .* cannot count beyond 256, and is 256: it counts in"
    ):
        optimizer = trained_on(how)
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["step"].item() == 258


def trained_on(how: str) -> Optimizer:
    p, optimizer = loaded(torch.bfloat16, how, 256, "split433")
    train(p, optimizer, range(256, 258))
    return optimizer
