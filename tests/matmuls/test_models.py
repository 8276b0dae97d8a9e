"""Matmuls of whole models in fp8: which ones, by which scales, how many reductions, and the gradients, bit for bit."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from fp8_models import (
    by_layer,
    compiled,
    forward,
    gradients,
    graph,
    largest_difference,
    loss_of,
    reference,
    small_gpt,
    tokens,
    trained,
)
from torch import nn

from collage_neuron.matmuls.capture import Backend
from collage_neuron.passes.fp8_scaling.scaled_matmul import amax_powers
from collage_neuron.passes.fp8_scaling.sizes import RULES

aten: Any = torch.ops.aten
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""torch.compile makes an instance of a function like `Layer` when it captures it."""


def as_captured(model: nn.Module) -> nn.Module:
    """In the operations of torch.compile's graphs: of silu's gradient these are other ones than in eager mode."""
    vars(model)["forward"] = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    return model


def calls(model: nn.Module, target: object) -> int:
    """How often the halves of the first graph call a function."""
    return sum(n.target is target for half in graph(model).halves for n in half.plain.module.graph.nodes)


@cache
def captured() -> tuple[nn.Module, nn.Module]:
    """A language model, and a copy that is compiled and has had one call, so that it has its graphs and scales."""
    plain = small_gpt()
    model = compiled(copy.deepcopy(plain))
    trained(model, tokens())
    return plain, model


def test_every_linear_layer_but_the_head_and_no_reduction() -> None:
    _, model = captured()
    made = graph(model).plan
    assert made.kept == ["head.weight"]
    assert len(made.products) == 3 * 4
    assert not made.reductions
    assert calls(model, amax_powers) == 0
    assert calls(model, aten.mm.default) == 3  # the head's
    assert sum("amax" in str(n.target) or "max" in str(n.target) for n in _nodes(model)) == 0


def _nodes(model: nn.Module) -> list[Any]:
    return [n for half in graph(model).halves for n in half.plain.module.graph.nodes]


def test_loss_and_gradients_are_those_of_a_plain_implementation() -> None:
    plain, model = captured()  # the exponents of gradients are those of the first backward
    other = as_captured(reference(plain, by_layer(model)))
    for seed in range(3):
        (loss, found), (wanted_loss, wanted) = trained(model, tokens(seed)), trained(other, tokens(seed))
        assert torch.equal(loss, wanted_loss)
        assert found.keys() == wanted.keys()
        assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


def test_predicted_sizes_are_within_a_binade() -> None:
    model = compiled(small_gpt(), rescale=50)
    trained(model, tokens())
    seen = forward(model).backend.scales.seen()
    assert len(seen) == 12
    assert {n: s.drift for n, s in seen.items() if not 0.5 <= s.drift <= 2} == {}
    assert max(s.saturated for s in seen.values()) == 0
    assert max(s.vanished for s in seen.values()) < 2.0**-6


@pytest.mark.parametrize("operation", [aten.embedding, aten.gelu_backward, aten.t], ids=str)
def test_reductions_instead_of_a_rule_give_nearly_the_same(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small_gpt()
    loss, wanted = trained(copy.deepcopy(plain), tokens())
    monkeypatch.delitem(RULES, operation)
    model = compiled(plain)
    found_loss, found = trained(model, tokens())
    reductions = len(graph(model).plan.reductions)
    assert 0 < reductions <= calls(model, amax_powers) <= 2 * reductions  # in one half, or in both
    assert abs(float(found_loss - loss)) < 2.0**-6
    # An operand is off by half a last place of e4m3 or e5m2, 2**-4 and 2**-3 of itself, and a few of them add up.
    assert largest_difference(found, wanted) < 2.0**-2


def test_a_huge_head_gradient_and_a_tiny_one_train_alike() -> None:
    """Scales follow the gradient that comes in, so a factor before the loss changes nothing but the exponents."""
    found = []
    for factor in (2.0**-40, 1.0, 2.0**40):
        model = compiled(small_gpt())
        (loss_of(model, tokens()) * factor).backward()
        found.append({n: g.float() / factor for n, g in gradients(model).items()})
    for n, g in found[1].items():
        if not n.startswith("layers.") or n.endswith("0.weight"):
            continue
        assert torch.equal(found[0][n], g)
        assert torch.equal(found[2][n], g)


def test_zero_weights_take_their_largest_magnitude() -> None:
    model = small_gpt()
    with torch.no_grad():
        model.get_parameter("layers.0.think.3.weight").zero_()
    compiled(model)
    trained(model, tokens())
    assert "zeros" in graph(model).plan.reductions["layers.0.think.3.weight"]
    with torch.no_grad():
        model.get_parameter("layers.0.think.3.weight").normal_(std=0.02)
    loss, _ = trained(model, tokens())
    assert loss.isfinite()


def test_the_backend_can_be_given_to_torch_compile() -> None:
    """For options of torch.compile that `compile` does not set; `explain` and the monitor then know nothing of it."""
    plain = small_gpt()
    loss, wanted = trained(compiled(copy.deepcopy(plain)), tokens())
    backend = Backend(plain, None, 0)
    model: Any = torch.compile(plain, backend=backend, fullgraph=True)
    other = loss_of(model, tokens())
    other.backward()
    assert torch.equal(other.detach(), loss)
    assert all(torch.equal(g, wanted[n]) for n, g in gradients(plain).items())
    assert len(backend.graphs[0].plan.products) == 12


def test_keep_names_layers_by_module_or_parameter() -> None:
    model = compiled(small_gpt(), keep=["layers.0.attend", "layers.0.think.3.weight"])
    trained(model, tokens())
    made = graph(model).plan
    assert made.kept == [f"layers.0.{name}.weight" for name in ("attend.1.out", "attend.1.qkv", "think.3")]
    assert {p.parameter for p in made.products} == {"layers.0.think.1.weight", "head.weight"}
    assert len(made.products) == 2 * 3
