"""A copied optimizer on XLA may step first: what it was copied from keeps its states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import collage_neuron

Pair = tuple[Parameter, Any]


def _stepped(pair: Pair, steps: int = 1) -> Parameter:
    p, optimizer = pair
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p


def _made(device: torch.device) -> Pair:
    p = Parameter(torch.ones(4, 8, dtype=torch.bfloat16).to(device))
    optimizer = torch.optim.AdamW([p], lr=1e-2)
    return p, collage_neuron.compile(optimizer, strategy="full", backend="xla", verbose=False)


def _loaded(pair: Pair, device: torch.device) -> Pair:
    p, optimizer = _made(device)
    p.data.copy_(pair[0].data)
    optimizer.load_state_dict(copy.deepcopy(pair[1].state_dict()))
    return p, optimizer


@pytest.mark.parametrize("copied", [_loaded, lambda pair, device: copy.deepcopy(pair)])
def test_the_copy_may_step_first(copied: Callable[[Pair, torch.device], Pair], xla: torch.device) -> None:
    pair = _made(xla)
    _stepped(pair, 3)
    torch_xla = pytest.importorskip("torch_xla")
    torch_xla.sync()
    other = copied(pair, xla)
    found = []
    for each in (other, pair, pair, other):
        found.append(_stepped(each).detach().cpu().clone())
        torch_xla.sync()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[1], found[2])
