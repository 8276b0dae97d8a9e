"""Numbers that a step reads: each call runs once more at most, and what was written since does not count."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from traced_updates import Stepping, place, set_gradients, stepped_beside

import collage_neuron

SHAPES = (70, 70), (3,), (4, 6), (80, 60)  # the first and the last are large: what is computed of them is let go


def between_writes(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p))
    before = m.sum().item()
    flat = m.mul_(0.9).add_(g).view(-1)
    most = m.abs().max().item()
    flat.mul_(1 / (1 + abs(before)))
    u = m * m + 1
    p.sub_(u.sqrt() - 1, alpha=lr * (1 + most) / (1 + m.norm().item()))
    m.add_(u, alpha=0.01 * min(u.mean().item(), 1.0))


def of_the_last_parameter(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    before = o.kept["norm"] if place(o, p) else 1.0
    p.sub_(g / (1 + before), alpha=lr)
    o.kept["norm"] = p.norm()


def of_all_so_far(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    o.kept["sum"] = (o.kept["sum"] if place(o, p) else torch.zeros(())) + g.norm()
    v = s.setdefault("v", torch.ones_like(p)).lerp_(g * g, 0.1)
    p.sub_(g / v.sqrt() / (1 + o.kept["sum"]), alpha=lr)


def with_trust(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g) / (g.square() + 1).sqrt()
    weight, size = p.norm().item(), u.norm().item()
    p.sub_(u, alpha=lr * (weight / size if weight > 0 and size > 0 else 1))


def and_ends_earlier(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Than the step before: what that one has known is not known of this one."""
    p.sub_(g, alpha=lr / (1 + g.norm().item()))
    if t % 3 and place(o, p) == 3:
        p.mul_(1 - 0.1 * lr / (1 + p.sum().abs().item()))
        if t % 2:
            p.sub_(g, alpha=lr * p.mean().item())


def of_the_second_as_it_was(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Its norm is needed at the end of the step, when a later value was asked for."""
    second = o.param_groups[0]["params"][1]
    p.sub_(g / (1 + second.norm()), alpha=lr)
    second.mul_(0.9)
    p.sub_(g, alpha=lr / (1 + second.norm().item()))


CASES = (
    between_writes,
    of_the_last_parameter,
    of_all_so_far,
    with_trust,
    and_ends_earlier,
    of_the_second_as_it_was,
)


def run(update: Any, strategy: str) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    params = [
        Parameter(torch.randn(shape).bfloat16().to(torch.bfloat16 if strategy else torch.float32)) for shape in SHAPES
    ]
    return stepped_beside(partial(Stepping, update=update), params, strategy, 8)


@pytest.mark.parametrize("update", CASES)
def test_numbers_are_those_of_then(update: Any) -> None:
    optimizer, found = run(update, "fp32")
    for x, y in zip(found, run(update, "")[1], strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6)
    traces = optimizer._collage_bookkeeping.traces
    assert (traces.misses, traces.why) == (0, "")


@pytest.mark.parametrize("update", [of_all_so_far, and_ends_earlier])
def test_a_call_runs_once_more_at_most(update: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those about large tensors, of which nothing stays."""
    monkeypatch.setattr("collage_neuron.trace.materialize.SMALL", 10**6)
    optimizer, _ = run(update, "fp32")
    for kind in optimizer._collage_bookkeeping.traces.kinds:
        numbers = [run.number for cone in kind.cones.known if not cone.is_anew for run in cone.runs]
        assert len(numbers) == len(set(numbers))
        assert not any(cone.is_anew for cone in kind.cones.known)


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
