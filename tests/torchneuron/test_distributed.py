"""DDP on the device `neuron`: processes that are joined by a process group of its own, which sends over gloo."""

from __future__ import annotations

from pathlib import Path

import ddp_on_neuron
import pytest
import torch
from worlds import run_world


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("strategy", ["split433", "plus"])
def test_replicas_stay_the_same_bits(strategy: str, compile_first: bool, tmp_path: Path) -> None:
    found = run_world(2, tmp_path, ddp_on_neuron.replicas, strategy, 4, compile_first)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert len(found[0]) > 4
