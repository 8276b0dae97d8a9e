"""Whole optimizers with stochastic stores: no bias on average, equal seeds, resumed runs, what is rejected."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import differences, gpt, snapshot, train
from oracles import hoeffding
from torch import nn

import collage_neuron

pytestmark = pytest.mark.usefixtures("rejecting")


def sgd(strategy: str, n: int, device: str | torch.device = "cpu", **settings: Any) -> tuple[nn.Parameter, Any]:
    p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16, device="cpu").to(device))
    return p, collage_neuron.compile(torch.optim.SGD([p], lr=1.0), strategy=strategy, **settings)


def test_small_updates_arrive_on_average_and_in_bf16_never() -> None:
    """Steps of 2**-11 from 1 to 2: above 1 an ulp is 2**-7, and rounding to nearest loses every one of them.

    Each step's rounding error is within an ulp and has mean 0 whatever happened before (Azuma and Hoeffding).
    """
    n, steps, update = 4096, 256, 2.0**-11
    for strategy, arrives in (("stochastic", True), ("bf16", False)):
        p, optimizer = sgd(strategy, n)
        for _ in range(steps):
            p.grad = torch.full_like(p, -update)
            optimizer.step()
        mean = p.detach().double().mean().item()
        bound = 2**-7 * math.sqrt(2 * steps * math.log(2 / 1e-9) / n)
        assert (abs(mean - (1 + steps * update)) <= bound) == arrives
    assert bound < steps * update / 8  # it says something
    assert mean == 1


def test_second_moments_decay_on_average_when_states_are_stored_stochastically() -> None:
    """v of 1 times 0.999**t: within Azuma's bound with `stochastic_states`; stuck with the other two."""
    n, steps = 4096, 400
    means = {}
    for strategy in ("bf16", "stochastic", "stochastic_states"):
        p = nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
        optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=0.0, betas=(0.9, 0.999)), strategy=strategy)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.state[p]["exp_avg_sq"].fill_(1.0)
        for _ in range(steps):
            optimizer.step()
        means[strategy] = optimizer.state[p]["exp_avg_sq"].double().mean().item()
    bound = 2**-8 * math.sqrt(2 * steps * math.log(2 / 1e-9) / n)  # below 1 an ulp is 2**-8
    assert abs(means["stochastic_states"] - 0.999**steps) <= bound < 0.05
    assert means["bf16"] == means["stochastic"] == 1


@pytest.mark.parametrize("strategy", ["stochastic", "stochastic_states"])
def test_equal_seeds_give_equal_runs_and_others_do_not(strategy: str) -> None:
    runs = []
    for seed in (5, 5, 6):
        model: nn.Module = gpt()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, seed=seed)
        train(model, optimizer, range(4))
        runs.append((model, optimizer))
    assert differences(snapshot(runs[0][1]), snapshot(runs[1][1])) == []
    assert differences(snapshot(runs[0][1]), snapshot(runs[2][1])) != []


def test_parameters_of_one_update_and_of_two_groups_draw_apart() -> None:
    params = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(4)]
    groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = collage_neuron.compile(torch.optim.SGD(groups, lr=1.0), strategy="stochastic")
    for p in params:
        p.grad = torch.full_like(p, -(2.0**-8))
    optimizer.step()
    for i, p in enumerate(params):
        assert abs((p.detach() != 1).double().mean().item() - 0.5) <= hoeffding(4096)
        for q in params[:i]:
            assert abs((p == q).double().mean().item() - 0.5) <= hoeffding(4096)


def test_what_cannot_work_is_refused() -> None:
    for strategy in ("stochastic", {"*": "bf16_stochastic"}):
        with pytest.raises(ValueError, match=r"leaves its store nothing to round.*use arithmetic='fp32'"):
            sgd(strategy, 4, arithmetic="bf16")  # type: ignore[arg-type]
    for seed in (-1, 2**32, 1.5, "1"):
        with pytest.raises(ValueError, match=f"seed is {seed!r}; give a whole number of 32 bits, from 0 to 4294967295"):
            sgd("stochastic", 4, seed=seed)
