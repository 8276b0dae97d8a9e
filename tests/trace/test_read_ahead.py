"""Numbers that a step reads, computed ahead for all parameters at once, have the bits of those computed when asked for.

What was written since does not count.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from reading_updates import READ, UPDATES
from torch.nn import Parameter
from traced_updates import Stepping, set_gradients, stepped_beside

import collage_neuron

SHAPES = (4, 6), (3,), (4, 6), (), (70, 70), (3,), (4, 6), (), (1, 33), (4, 6)  # one is large: it is not computed ahead


def run(
    update: Any, strategy: str, shapes: Any = SHAPES, steps: int = 11
) -> tuple[Any, list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if strategy else torch.float32
    params = [Parameter(torch.randn(shape).bfloat16().to(dtype)) for shape in shapes]
    READ.clear()
    optimizer, found = stepped_beside(partial(Stepping, update=update), params, strategy, steps)
    return optimizer, found, READ.copy()


@pytest.mark.parametrize("update", UPDATES)
def test_numbers_are_those_that_are_computed_when_asked_for(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, found, ahead = run(update, "fp32")
    monkeypatch.setattr("collage_neuron.trace.read_ahead.FEWEST", 10**6)
    _, expected, asked = run(update, "fp32")
    assert ahead == asked
    assert all(map(torch.equal, found, expected))
    for x, y in zip(found, run(update, "")[1], strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
    traces = optimizer._collage_bookkeeping.traces
    assert (traces.misses, traces.why) == (0, "")


LOG: list[float] = []


class OfModes(torch.optim.Optimizer):
    """Steps that begin alike, and end early or go on; what they read is in a list that nobody restores."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.kept: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        mode, params = "klekk"[len(LOG) % 8 // 2], self.param_groups[0]["params"]
        for p in params:
            self.state[p].setdefault("m", torch.zeros_like(p))
        own = [self.state[p]["m"] for p in params]
        LOG.append(float(params[0].norm()))
        if mode == "k":
            self.kept = sum(m.norm() for m in own)
        if mode != "e":
            params[1].div_(1 + 0.01 * own[1].norm(dim=1, keepdim=True))
            LOG.append(float(own[1].norm()))
            for p, m in zip(params, own, strict=True):
                p.sub_(m.lerp_(p.grad, 0.1), alpha=0.1 / len(LOG))


def test_a_step_that_goes_on_where_another_ended_is_taken_once() -> None:
    """That one has more placeholders than this one has had so far: it takes the places of no others."""
    found = []
    for strategy in ("", "fp32"):
        LOG.clear()
        torch.manual_seed(0)
        params = [Parameter(torch.randn(shape)) for shape in ((50,), (7, 6))]
        optimizer: Any = OfModes(params)
        if strategy:
            optimizer = collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
        for t in range(9):
            set_gradients(params, t)
            optimizer.step()
        found.append(LOG.copy())
    assert found[1] == pytest.approx(found[0], rel=1e-5)
