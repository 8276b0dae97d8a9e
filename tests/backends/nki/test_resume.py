"""Runs on kernels go on bit for bit, and skip steps; the level of evidence is that of pytest's header."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nki_backend
import nki_standin
import pytest
import torch
from models import MODES, differences, parameters, set_gradients, snapshot
from nki_runs import INFINITY
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import skipped_steps
from collage_neuron.passes.backends.nki import custom_op, source_cache

DRAWN = {"stochastic", "stochastic_states", "split422", "split412", "split322", "split312", "split311"}
"""Strategies of which kernels draw other bits than the other backends."""
KEPT = [(s, a) for s, a in MODES if s not in DRAWN]
CACHED = custom_op.function


@pytest.fixture(autouse=True)
def _kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    if nki_backend.backend() == "real":
        yield
    else:
        with nki_standin.install("nki", "trn1", INFINITY):
            yield
    CACHED.cache_clear()  # a kernel belongs to the NKI it was loaded under


def start(seed: int, **settings: Any) -> tuple[list[nn.Parameter], Optimizer]:
    params = parameters(seed, ((16, 8), (5,), (0, 3)))
    optimizer = AdamW(params, lr=1e-3, weight_decay=0.1)
    return params, collage_neuron.compile(optimizer, backend="nki", **settings)


def go_on(params: list[nn.Parameter], optimizer: Optimizer, steps: range) -> dict[str, Any]:
    for i in steps:
        set_gradients(params, i)
        optimizer.step()
    return snapshot(optimizer)


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
