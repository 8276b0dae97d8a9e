"""A model in fp8 in DDP: wrapped before the line or after it, gradients are reduced, and each layer stays in fp8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import in_turn, run_world

import collage_neuron
from collage_neuron.matmuls.install import forward_of


def body(before: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = DistributedDataParallel(model) if before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = collage_neuron.compile(model, optimizer, matmul="fp8", rescale=0)
    model = model if before else DistributedDataParallel(model)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    model(x).float().square().mean().backward()
    forward = forward_of(model)
    assert forward is not None
    (graph,) = forward.backend.graphs
    return [p.grad for p in model.parameters() if p.grad is not None], len(graph.plan.products)


@pytest.mark.slow
def test_gradients_are_reduced_wherever_ddp_is(tmp_path: Path) -> None:
    own, others = run_world(2, tmp_path, in_turn, {before: (body, before) for before in (False, True)})
    first, second = own[False], others[False]
    assert first[1] == second[1] == 2
    for other in (second, own[True], others[True]):
        assert all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))
