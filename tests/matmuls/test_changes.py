"""What changes around a model in fp8: names, shapes, sites, hooks, classes, modes; scales and graphs follow."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fp8_models import batch, compiled, error, forward, gradients, graph, small
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import collage_neuron
from collage_neuron.matmuls.forward import MANY


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)))  # type: ignore[no-any-return]  # a Module returns Any


@pytest.mark.parametrize("keep", [None, ["head"], ["head.weight"], ["embed"]])
def test_a_tied_weight_is_kept_by_any_of_its_names(keep: list[str] | None) -> None:
    model = compiled(Tied().bfloat16(), keep=keep)
    model(torch.arange(32)).float().sum().backward()
    assert graph(model).plan.kept == ["embed.weight"]
    assert {p.parameter for p in graph(model).plan.products} == {"layer.weight"}


# ---- graphs that share weights, and have scales of their own


def test_a_batch_of_another_shape_leaves_the_scales_of_inputs_alone() -> None:
    model, plain = compiled(small(), rescale=50), small()

    def step(rows: int, seed: int, factor: float) -> float:
        for m in (model, plain):
            m.zero_grad()
            m(batch(seed, rows) * factor).float().square().sum().backward()
        return error(gradients(model)["0.weight"], gradients(plain)["0.weight"])

    for seed in range(20):
        step(32, seed, 1.0)
    for seed in range(20, 30):  # in turns, as of two sets of data
        assert step(16, seed, 2000.0) < 0.25
        assert step(32, seed, 1.0) < 0.25
    exponents = forward(model).backend.scales.exponents()
    assert exponents["0.input@1"] - exponents["0.input"] == 11
    assert "0.weight@1" not in exponents


def test_weights_that_one_graph_finds_changed_are_measured_by_the_other() -> None:
    model = compiled(small(), rescale=50)
    for seed in range(20):
        model(batch(seed)).float().sum().backward()
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2.0**9)
    for _ in range(2):
        model(batch(rows=16)).float().sum().backward()  # a new graph, which measures
    model(batch()).float().sum().backward()
    assert [half.recalibration.history[-1] for half in graph(model).halves] == [21, 21]


class Sites(nn.Module):
    """A layer that is called for small values and for large ones, or only for these."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        y = self.layer(x * 2.0**14) * 2.0**-14
        return self.head(self.layer(x * 2.0**-14) + y if both else y)  # type: ignore[no-any-return]  # as above


class Swapped(Sites):
    """The same in the other order, so that the site in use has another number in each graph."""

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        first = self.layer(x * 2.0**-14) if both else 0
        return self.head(first + self.layer(x * 2.0**14) * 2.0**-14)  # type: ignore[no-any-return]  # as above


@pytest.mark.parametrize("kind", [Sites, Swapped])
@pytest.mark.parametrize("rescale", [0, 50])
def test_a_graph_with_other_sites_has_scales_of_its_own(kind: type[Sites], rescale: int) -> None:
    model = compiled(kind().bfloat16(), rescale=rescale)
    plain = kind().bfloat16()
    for seed in range(3):
        model(batch(seed)).float().sum().backward()
    with torch.no_grad():
        assert error(model(batch(), False), plain(batch(), False)) < 0.1
    assert error(model(batch(), False), plain(batch(), False)) < 0.1


def test_validation_on_larger_values_leaves_training_alone() -> None:
    model, plain = compiled(small(), rescale=50), small()
    for seed in range(3):
        model(batch(seed)).float().sum().backward()
    before = forward(model).backend.scales.exponents()
    with torch.no_grad():
        assert error(model(batch() * 2.0**12), plain(batch() * 2.0**12)) < 0.1
    after = forward(model).backend.scales.exponents()
    assert all(after[name] == e for name, e in before.items())
    assert after["0.input@1"] - after["0.input"] == 12


# ---- what torch.compile takes for granted


def test_a_hook_of_all_modules_that_is_added_later_runs() -> None:
    model = compiled(small())
    before = model(batch())
    handle = register_module_forward_hook(lambda module, args, out: out * 2 if isinstance(module, nn.GELU) else None)
    try:
        assert not torch.equal(model(batch()), before)
    finally:
        handle.remove()
    assert torch.equal(model(batch()), before)


def test_a_forward_that_is_exchanged_in_its_class_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = compiled(nn.Sequential(nn.Linear(64, 64), Scaled(), nn.Linear(64, 8, bias=False)).bfloat16())
    before = model(batch())
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x * 4)
    assert torch.equal(model(batch()), before * 4)


class Doubled(nn.Sequential):
    """A class that a model has later."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return 2 * x


@pytest.mark.parametrize("fails", [False, True], ids=["", "after an error"])
def test_a_model_that_has_another_class_runs_its_forward(fails: bool) -> None:
    model = compiled(small())
    before = compiled(small())(batch())
    with pytest.raises(TypeError) if fails else nullcontext():
        model(None if fails else batch())
    model.__class__ = Doubled
    assert torch.equal(model(batch()), 2 * before)


def test_a_shallow_copy_has_attributes_of_its_own() -> None:
    model = compiled(small())
    before = model(batch())
    for other in (copy.copy(model), copy.copy(copy.copy(model))):
        other.__class__ = Doubled
        assert torch.equal(other(batch()), 2 * before)
    around = copy.copy(model)
    around.__class__ = Doubled
    assert torch.equal(torch.compile(around, backend="eager")(batch()), 2 * before)
    assert torch.equal(model(batch()), before)


@pytest.mark.usefixtures("wide_numbers")
def test_scales_do_not_depend_on_the_default_dtype() -> None:
    model = compiled(small(), rescale=50)
    model(batch()).float().sum().backward()


@pytest.fixture
def wide_numbers() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Attending(nn.Module):
    """Attention as torch has it, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.layer = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.layer(y))  # type: ignore[no-any-return]  # a Module returns Any


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 64, batch_first=True, dropout=0.0)
    return nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(64, 8))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("make", [Attending, encoder])
def test_attention_of_torch_runs_in_fp8_without_gradients(make: Any) -> None:
    torch.manual_seed(0)
    model = compiled(make().bfloat16())
    x = batch().unflatten(0, (4, 8))
    before = torch.backends.mha.get_fastpath_enabled()
    y = model.eval()(x)
    with torch.no_grad():
        assert torch.equal(model(x), y)
    assert len({tuple(p.parameter for p in g.plan.products if p.role == "output") for g in graphs(model)}) == 1
    assert torch.backends.mha.get_fastpath_enabled() == before


def graphs(model: nn.Module) -> list[Any]:
    return forward(model).backend.graphs


# ---- many graphs


def test_many_shapes_are_warned_of_once_and_too_many_graphs_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collage_neuron.matmuls.forward.MOST", most := MANY + 3)
    model = compiled(nn.Linear(64, 8).bfloat16(), keep=())
    for rows in range(2, MANY + 2):
        model(batch(rows=rows))
    with pytest.warns(UserWarning, match="captured this Linear 9 times.*Pad batches to a few shapes"):
        model(batch(rows=MANY + 2))
    model(batch(rows=2))
    model(batch(rows=MANY + 3))
    assert len(graphs(model)) == MANY + 2
    with pytest.warns(UserWarning, match=f"drops {most} graphs"):
        model(batch(rows=MANY + 4))
    model(batch(rows=3)).float().sum().backward()
    assert len(graphs(model)) == 1
    assert "0 (forward and backward)" in collage_neuron.explain(model)
    assert copy.deepcopy(model)(batch()).shape == (32, 8)
