"""The programs that torch_xla compiles for a model in fp8: of measured calls, of those after them, of plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_models import forward, perceptron
from torch import nn

import collage_neuron

RESCALE = 4
"""Measured calls: 1, 2, 4, 8, 12, ..."""


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    import torch_xla

    optimizer.zero_grad()
    model(batch).float().square().mean().backward()
    optimizer.step()
    torch_xla.sync(wait=True)


def compiled_programs(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[int]:
    """The number of programs that were compiled for each step."""
    met = pytest.importorskip("torch_xla.debug.metrics")
    found = []
    for batch in batches:
        met.clear_all()
        step(model, optimizer, batch)
        found.append(met.metric_data("CompileTime")[0] if met.metric_data("CompileTime") else 0)
    return found


@pytest.mark.slow
def test_after_each_kind_of_call_was_seen_little_is_compiled(xla: torch.device) -> None:
    """Nearly all programs are those of the first four calls, and none is compiled for a plain one.

    A measured call is cut into several programs: torch_xla reads the bits of a number (`view(torch.int32)`) first.
    """
    model = perceptron().eval().to(xla)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(
        model, optimizer, matmul="fp8", rescale=RESCALE, validate="off", verbose=False
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 8, generator=generator).bfloat16().to(xla) for _ in range(24)]
    found = compiled_programs(model, optimizer, batches)
    halves = forward(model).backend.graphs[0].halves
    assert [half.pace.history for half in halves] == [[20, 24]] * 2
    measured = {7, 11, 15, 19, 23}  # calls 8, 12, ...
    assert all(n == 0 for i, n in enumerate(found) if i >= 4 and i not in measured), found
    assert all(found[i] <= 3 for i in measured), found
    assert found[16:] == [0] * 8, found
