"""The strategies named by their bytes, from end to end on the reference backend: rows with tails, 0-d, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import REPRESENTATIVE

import collage_neuron
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import STRATEGIES, StrategyLike, formats_of_signs

SPLIT = [name for name in STRATEGIES if name.startswith("split")]
NARROW = {name: {"param": "bf16+int16", "exp_avg": name, "exp_avg_sq": "u16q8"} for name in ("fp16", "e4m3", "e5m2")}
"""Formats that no strategy has."""
SHAPES = ((300,), (5, 130), (), (3, 4, 70))
ERROR = {"split4": 2e-5, "split3": 2e-4, "split312": 2e-3, "split311": 5e-3, "fp16": 1e-4, "e4m3": 5e-3, "e5m2": 1e-2}
"""Of the parameter's norm, after 20 steps; about three times what is found."""


def steps(optimizer: Any, params: Any, others: Any, reference: Any, numbers: range) -> None:
    for i in numbers:
        g = torch.Generator().manual_seed(i)
        for p, q in zip(params, others, strict=True):
            p.grad = (torch.randn(p.shape, generator=g) * 1e-3 + 1e-4).bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()


@pytest.mark.parametrize("name", [*SPLIT, *NARROW])
def test_adamw_follows_fp32_through_a_checkpoint(name: str) -> None:
    strategy: StrategyLike = NARROW.get(name, name)
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, generator=g) * 0.02).bfloat16()) for s in SHAPES]
    others = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-4), strategy=strategy)
    reference = torch.optim.AdamW(others, lr=1e-4)
    steps(optimizer, params, others, reference, range(10))
    before = [collage_neuron.exact_value(optimizer, p) for p in params]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(torch.equal(collage_neuron.exact_value(optimizer, p), x) for p, x in zip(params, before, strict=True))
    steps(optimizer, params, others, reference, range(10, 20))
    error = ERROR[name] if name in ERROR else ERROR[name[:6]]
    for p, q in zip(params, others, strict=True):
        assert (collage_neuron.exact_value(optimizer, p) - q).norm() <= error * q.norm()


def test_a_state_that_may_be_negative_gets_no_format_without_signs() -> None:
    """ASGD's average of the parameter is slow, and as negative as the parameter."""
    p = torch.nn.Parameter(torch.randn(5, 130).bfloat16())
    optimizer = collage_neuron.compile(torch.optim.ASGD([p]), strategy="split311")
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert optimizer.state[p]["ax"].dtype == torch.bfloat16
    formats: dict[str, Format] = {n: format_named(f) for n, f in (("param", "bf16+int8"), ("v", "ue5m3"))}
    assert formats_of_signs("split311", formats, frozenset({"v"})) == formats
    assert formats_of_signs("split311", formats, frozenset())["v"] is formats["param"]


def test_the_strategies_that_represent_the_others_store_in_every_format() -> None:
    used, shown = (
        {f for name in names for f in (STRATEGIES[name].param, STRATEGIES[name].state, STRATEGIES[name].slow)}
        for names in (STRATEGIES, REPRESENTATIVE)
    )
    assert used == shown
