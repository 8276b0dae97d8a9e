"""Runs on kernels go on bit for bit, and skip steps; the level of evidence is that of pytest's header."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import MODES, differences, parameters, set_gradients, snapshot
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import skipped_steps

DRAWN = {"stochastic", "stochastic_states", "split422", "split412", "split322", "split312", "split311"}
"""Strategies of which kernels draw other bits than the other backends."""
KEPT = [(s, a) for s, a in MODES if s not in DRAWN]

pytestmark = [pytest.mark.usefixtures("kernels"), pytest.mark.parametrize("kernels", ["nki"], indirect=True)]


def start(seed: int, **settings: Any) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters(seed, ((16, 8), (5,), (0, 3)))
    optimizer = AdamW(params, lr=1e-3, weight_decay=0.1)
    return params, collage_neuron.compile(optimizer, backend="nki", **settings)


def go_on(params: list[nn.Parameter], optimizer: Optimizer, steps: range) -> dict[str, Any]:
    for i in steps:
        set_gradients(params, i)
        optimizer.step()
    return snapshot(optimizer)


@pytest.mark.sampled(of=6, each=False)  # what is saved and loaded is no matter of kernels
@pytest.mark.parametrize(("strategy", "arithmetic"), KEPT)
def test_a_run_on_kernels_goes_on_bit_for_bit(strategy: str, arithmetic: str) -> None:
    params, optimizer = start(0, strategy=strategy, arithmetic=arithmetic)
    go_on(params, optimizer, range(2))
    saved = copy.deepcopy((params, optimizer.state_dict()))
    others, other = start(1, strategy=strategy, arithmetic=arithmetic)
    with torch.no_grad():
        for p, q in zip(others, saved[0], strict=True):
            p.copy_(q)
    other.load_state_dict(saved[1])
    assert differences(go_on(others, other, range(2, 4)), go_on(params, optimizer, range(2, 4))) == []


def test_a_step_on_kernels_is_skipped() -> None:
    params, optimizer = start(0, nonfinite="skip")
    before = {k: v for k, v in go_on(params, optimizer, range(2)).items() if k.endswith(("param", "_lo", "avg", "_sq"))}
    set_gradients(params, 9)
    assert params[1].grad is not None
    params[1].grad[0] = torch.nan
    optimizer.step()
    after = snapshot(optimizer)
    assert differences({k: after[k] for k in before}, before) == []
    assert skipped_steps(optimizer) == 1
    go_on(params, optimizer, range(2, 3))
    assert skipped_steps(optimizer) == 1
