"""Exponents that drift: measured at due calls, shifted in one vector, without another capture."""

from __future__ import annotations

import copy

import pytest
import torch
from fp8_models import by_layer, compiled, forward, gradients, graph, loss_of, reference, small_gpt, tokens
from torch import nn


def grown(model: nn.Module, factor: float, which: str = "layers.0.think") -> None:
    """Weights that training made larger: not noticed, as writes by other code are."""
    for n, p in model.named_parameters():
        if n.startswith(which):
            p.data.mul_(factor)


def test_scales_follow_without_another_capture() -> None:
    model = compiled(small_gpt(), rescale=3)
    for i in range(3):
        loss_of(model, tokens(i)).backward()
    before = forward(model).backend.scales.exponents()
    grown(model, 2.0**6)
    for i in range(3):
        loss_of(model, tokens(i)).backward()
    after = forward(model).backend.scales.exponents()
    seen = forward(model).backend.scales.seen()
    assert seen["layers.0.think.3.weight"].saturated > 0  # before it was measured
    with pytest.warns(UserWarning, match=r"layers.0.think.\d.\w+ saturate: its scale was off by \d"):
        loss_of(model, tokens(0)).backward()  # so fast a drift is measured again in the next calls
    for i in range(2):
        loss_of(model, tokens(i)).backward()
    assert after["layers.0.think.3.weight"] - before["layers.0.think.3.weight"] == 6
    assert after["layers.0.attend.1.out.weight"] == before["layers.0.attend.1.out.weight"]
    assert len(forward(model).backend.graphs) == 1
    assert not any(half.recalibration.due(half.calls + 1) for half in graph(model).halves)
    model.zero_grad()
    loss = loss_of(model, tokens(9))
    loss.backward()
    other = reference(copy.deepcopy(model), by_layer(model))
    vars(other).pop("forward")
    wanted = loss_of(other, tokens(9))
    other.zero_grad()
    wanted.backward()
    assert torch.equal(loss, wanted)
    assert all(torch.equal(gradients(model)[n], g) for n, g in gradients(other).items())


def test_a_measured_call_gives_what_a_plain_one_gives() -> None:
    model, other = compiled(small_gpt(), rescale=50), compiled(small_gpt())
    for m in (model, other):
        loss_of(m, tokens()).backward()
    assert graph(model).halves[0].measuring is not None
    assert graph(other).halves[0].measuring is None
    found = {n: g for n, g in gradients(model).items() if n in ("head.weight", "norm.weight")}
    assert all(torch.equal(g, gradients(other)[n]) for n, g in found.items())


def test_without_rescale_nothing_moves() -> None:
    model = compiled(small_gpt())
    loss_of(model, tokens()).backward()
    before = forward(model).backend.scales.exponents()
    grown(model, 2.0**6)
    for i in range(4):
        loss_of(model, tokens(i)).backward()
    assert forward(model).backend.scales.exponents() == before
    assert forward(model).backend.scales.seen() == {}


def measured_calls(model: nn.Module, calls: int, change: dict[int, float], which: str) -> list[int]:
    """The calls that measured, of a model whose weights are multiplied before some of them."""
    found: list[int] = []
    for i in range(1, calls + 1):
        grown(model, change.get(i, 1), which)
        loss_of(model, tokens(i)).backward()
        last = graph(model).halves[0].recalibration.history[-1]
        found += [last] if last not in found else []
    return found


@pytest.mark.filterwarnings("ignore:matmul='fp8'.*its scale was off by")
def test_a_drift_that_lost_much_makes_the_next_call_a_first_one() -> None:
    jumped = measured_calls(compiled(small_gpt(), rescale=20), 41, {17: 64.0}, "layers.0.think")
    assert jumped == [1, 2, 3, 4, 8, 16, 21, 22, 23, 24, 25, 29, 37, 40]
