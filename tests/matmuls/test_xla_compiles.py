"""The programs that torch_xla compiles for a model in fp8: of measured calls, of those after them, of plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_models import forward, perceptron
from torch import nn

import collage_neuron


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    import torch_xla

    optimizer.zero_grad()
    model(batch).float().square().mean().backward()
    optimizer.step()
    torch_xla.sync(wait=True)


def programs(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each step the number of programs that were compiled, and of those that ran."""
    met = pytest.importorskip("torch_xla.debug.metrics")
    found = []
    for batch in batches:
        met.clear_all()
        step(model, optimizer, batch)
        new, old = (met.counter_value(f"{kind}Compile") or 0 for kind in ("Uncached", "Cached"))
        found.append((new, new + old))
    return found


@pytest.mark.slow
def test_after_each_kind_of_call_was_seen_a_step_is_one_program_and_none_is_compiled(xla: torch.device) -> None:
    """Measured or plain: `view(torch.int32)`, which torch_xla runs on the host, would cut a measured one in pieces."""
    rescale = 4
    model = perceptron().eval().to(xla)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(
        model, optimizer, matmul="fp8", rescale=rescale, validate="off", verbose=False
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 8, generator=generator).bfloat16().to(xla) for _ in range(rescale + 6)]
    found = programs(model, optimizer, batches)
    halves = forward(model).backend.graphs[0].halves
    assert [half.recalibration.history[-1] for half in halves] == [8] * 2
    assert found[5:] == [(0, 1)] * (rescale + 1), found
