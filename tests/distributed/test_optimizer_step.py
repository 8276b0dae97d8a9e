"""`xm.optimizer_step` and `xm.reduce_gradients`, which most loops of torch_xla call, over compiled optimizers.

torch_xla on the CPU has one device and no collectives among processes: with one process the functions run as they are,
with two the all-reduce is a stand-in that notes what it is given.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import bits, differences, snapshot
from torch.optim import AdamW

import collage_neuron
from collage_neuron.numerics.strategies import bytes_with_adam

pytest.importorskip("torch_xla")

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

STEPS = 3
PAGE = (Path(__file__).parents[2] / "docs" / "trn1_all_cores.md").read_text()


def made(strategy: str) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to("xla")
    return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-3), strategy=strategy)


def backward(model: torch.nn.Module, step: int) -> None:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).bfloat16().to("xla")
    model(inputs).float().square().mean().backward()


@pytest.mark.sampled(of=3, each=False)  # torch_xla calls `step` in each
@pytest.mark.parametrize("strategy", ["split433", "plus", "split422"])
def test_the_loop_of_torch_xla_takes_the_steps_of_the_plain_loop(strategy: str) -> None:
    (model, optimizer), (other, plain) = made(strategy), made(strategy)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step)
        xm.optimizer_step(optimizer, barrier=True)
        plain.zero_grad()
        backward(other, step)
        plain.step()
        torch_xla.sync()
    assert differences(snapshot(optimizer), snapshot(plain)) == []


@pytest.mark.parametrize("wide", [False, True], ids=["bf16", "accumulate_in_fp32"])
def test_gradients_are_reduced_in_place_before_the_step_reads_them(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, of which the other one has the same gradients: the sum times 1 / 2 changes nothing."""
    given: list[torch.dtype] = []

    def all_reduce(kind: Any, tensors: Any, scale: float, **others: Any) -> None:
        for t in tensors:
            given.append(t.dtype)
            t.add_(t.clone()).mul_(scale)

    (model, optimizer), (other, plain) = made("split433"), made("split433")
    for one in (model, other) if wide else ():
        collage_neuron.accumulate_in_fp32(one)
    backward(model, 0)
    backward(other, 0)
    monkeypatch.setattr(xr, "world_size", lambda: 2)
    monkeypatch.setattr(xm, "all_reduce", all_reduce)
    xm.reduce_gradients(optimizer)
    optimizer.step()
    plain.step()
    torch_xla.sync()
    assert given == [torch.float32 if wide else torch.bfloat16] * 2
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(bits(p), bits(q))
    assert differences(snapshot(optimizer), snapshot(plain)) == []


def test_the_page_has_the_bytes_of_the_formula() -> None:
    """ZeRO-1 over R cores: weight and gradient whole; of the shard a bf16 copy, its low word and the moments."""
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 3
    for name, alone, two, all_cores in rows:
        whole = bytes_with_adam(name)
        assert int(alone) == whole
        for cores, said in ((2, two), (32, all_cores)):
            assert float(said) == pytest.approx(4 + (whole - 2) / cores, abs=0.005), name
