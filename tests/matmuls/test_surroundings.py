"""What is around a model in fp8: copies, hooks, modes, shapes, other wrappers; and what is rejected, and why."""

from __future__ import annotations

import gc
import inspect
from typing import Any
from weakref import ref

import pytest
import torch
from fp8_models import compiled, forward, gradients, graph, loss_of, perceptron, small_gpt, tokens
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import collage_neuron
from collage_neuron import UnsupportedModel
from collage_neuron.matmuls.install import install


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()


def batch(rows: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()


def trained(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).float().square().mean().backward()
    return gradients(model)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# ---- the model stays the model


def test_the_model_keeps_its_class_its_keys_and_its_signature() -> None:
    plain = small_gpt()
    keys, signature = list(plain.state_dict()), inspect.signature(plain.forward)
    model = compiled(plain)
    assert model is plain
    loss_of(model, tokens()).backward()
    assert list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    assert [n for n, _ in model.named_modules()] == [n for n, _ in small_gpt().named_modules()]
    model.load_state_dict(small_gpt(1).bfloat16().state_dict())


def test_compiling_again_begins_anew_and_without_matmul_changes_nothing() -> None:
    model = compiled(small())
    first = forward(model)
    trained(model, batch())
    collage_neuron.compile(torch.optim.SGD(model.parameters(), lr=0.1))
    assert forward(model) is first
    compiled(model, keep=())
    assert forward(model) is not first
    trained(model, batch())
    assert graph(model).plan.kept == []


@pytest.mark.parametrize("keep", [None, ["2"]])
def test_a_model_that_is_let_go_is_freed(keep: list[str] | None) -> None:
    model = compiled(small(), keep=keep)
    trained(model, batch())
    held = ref(model)
    del model
    gc.collect()
    assert held() is None


def test_it_can_be_taken_away() -> None:
    model = compiled(small())
    assert not torch.equal(model(batch()), small()(batch()))
    del model.forward
    assert torch.equal(model(batch()), small()(batch()))


# ---- modes and shapes


def test_without_gradients_the_forward_is_that_of_training() -> None:
    model = compiled(small_gpt(), rescale=2)
    for seed in range(5):  # scales have moved
        loss_of(model, tokens(seed)).backward()
    before = model(tokens(9))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(model(tokens(9)), before)
            assert torch.equal(model(tokens(9)), before)
    assert {len(g.plan.products) for g in forward(model).backend.graphs} == {4, 12}


def test_dropout_follows_train_and_eval() -> None:
    model = compiled(perceptron())
    torch.manual_seed(5)
    first = model(batch())
    torch.manual_seed(6)
    assert not torch.equal(model(batch()), first)
    torch.manual_seed(5)
    assert torch.equal(model(batch()), first)
    model.eval()
    assert torch.equal(model(batch()), model(batch()))


def test_autocast_around_fp32() -> None:
    model = small().float()
    install(model, None, 0)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(batch().float())
    assert y.dtype == torch.bfloat16
    assert len(graph(model).plan.products) == 2  # the input has no gradient
    assert not graph(model).plan.reductions


def test_frozen_layers_have_no_gradients_of_weights() -> None:
    model = small_gpt()
    model.get_parameter("layers.0.think.1.weight").requires_grad_(False)
    compiled(model)
    loss_of(model, tokens()).backward()
    roles = [p.role for p in graph(model).plan.products if p.parameter == "layers.0.think.1.weight"]
    assert sorted(roles) == ["input gradient", "output"]


def test_a_backward_can_be_kept_and_run_again() -> None:
    model = compiled(small())
    loss = model(batch()).float().square().mean()
    loss.backward(retain_graph=True)
    once = {n: g.clone() for n, g in gradients(model).items()}
    loss.backward()
    assert all(torch.equal(2 * once[n], g) for n, g in gradients(model).items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_in_fp8(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, saves: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16))
            self.head, self.saves = nn.Linear(16, 4), saves

        def forward(self, x: Tensor) -> Tensor:
            y = checkpoint(self.body, x, use_reentrant=reentrant) if self.saves else self.body(x)
            return self.head(y)  # type: ignore[no-any-return]  # a Module returns Any

    model, plain = compiled(Checkpointed(True).bfloat16()), compiled(Checkpointed(False).bfloat16())
    assert same(trained(model, batch()), trained(plain, batch()))
    inner = graph(model).halves[1].plain.module
    assert sum("dot" in n.name for n in inner.graph.nodes) > sum(
        "dot" in n.name for n in graph(plain).halves[1].plain.module.graph.nodes
    )


# ---- others around it


def test_what_changes_about_a_model_is_noticed() -> None:
    """A layer that is thawed, a weight of another dtype, weights that are tied later."""
    model = compiled(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).bfloat16(), keep=())
    first, second = model.children()
    first.requires_grad_(False)
    assert trained(model, batch()).keys() == {"1.weight"}
    first.requires_grad_(True)
    found = trained(model, batch())
    assert found.keys() == {"0.weight", "1.weight"}
    second.weight = first.weight
    tied = trained(model, batch())
    assert tied.keys() == {"0.weight"}
    assert not torch.equal(tied["0.weight"], found["0.weight"])
    first.weight.data = first.weight.data.float()
    with pytest.raises(RuntimeError, match="have the same dtype"):  # as without fp8
        model(batch())


def test_programs_of_torchs_have_the_models_own_forward() -> None:
    model, plain = compiled(small()), small()
    assert torch.equal(torch.export.export(model, (batch(),)).module()(batch()), plain(batch()))
    assert torch.equal(torch.jit.trace(model, (batch(),), check_trace=False)(batch()), plain(batch()))
    assert not torch.equal(model(batch()), plain(batch()))


# ---- what is rejected


class Checking(nn.Module):
    """Rejects what it cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 16:
            raise KeyError("too many rows")
        return self.layer(x)  # type: ignore[no-any-return]  # a Module returns Any


def test_an_error_of_the_model_is_its_own() -> None:
    model = compiled(Checking().bfloat16(), keep=())
    with pytest.raises(KeyError, match="too many rows"):
        model(batch(17))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        model(batch(), y=1)
    model(batch())


class Branching(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)  # type: ignore[no-any-return]  # a Module returns Any


def test_what_cannot_be_captured_is_rejected_with_the_reason() -> None:
    model = compiled(Branching().bfloat16(), keep=())
    with pytest.raises(UnsupportedModel, match=r"(?s)Branching cannot be captured as one graph.*[Dd]ata-dependent"):
        model(batch())


def test_a_model_without_layers_to_rewrite_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"finds no matmul.*weight stay as they are: name fewer layers in keep"):
        compiled(nn.Linear(8, 8).bfloat16())(batch())


def test_a_compiler_that_is_switched_off_is_told() -> None:
    model = compiled(small())
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedModel, match=r"torch\.compile did not run"):
        model(batch())
    model(batch())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"matmul": "fp4"}, "unknown matmul 'fp4'; choose 'fp8'"),
        ({"matmul": "fp8", "keep": ["hed"]}, "keep names 'hed', and the model has no such module"),
        ({"matmul": "fp8", "keep": [""]}, "keep names ''"),
        ({"matmul": "fp8", "rescale": -1}, "rescale is -1; give a number of forward calls"),
        ({"keep": ["0"]}, "keep and rescale are about matmul='fp8'"),
        ({"rescale": 10}, "keep and rescale are about matmul='fp8'"),
    ],
)
def test_options_are_checked_before_anything_changes(options: dict[str, Any], message: str) -> None:
    model = small().float()
    with pytest.raises(ValueError, match=message):
        collage_neuron.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_an_optimizer_alone_has_no_layers() -> None:
    call: Any = collage_neuron.compile
    with pytest.raises(ValueError, match="rewrites the layers of a model"):
        call(torch.optim.SGD(small().parameters(), lr=0.1), matmul="fp8")


def test_a_forward_that_was_replaced_is_rejected() -> None:
    model = small()
    vars(model)["forward"] = lambda x: x
    with pytest.raises(ValueError, match=r"the forward of this Sequential was replaced by .*compile first"):
        compiled(model)


def test_explain_says_what_is_done_and_why_not() -> None:
    model = small_gpt()
    assert "captured at its first forward" in collage_neuron.explain(compiled(model, rescale=50))
    loss_of(model, tokens()).backward()
    text = collage_neuron.explain(model)
    assert "graph 0 (forward and backward): 12 matmuls of linear layers in fp8" in text
    assert "as they are: head.weight" in text
    assert "layers.0.think.3.gradient: e5m2, scale 2**" in text
    assert "% saturated" in text
    assert "largest magnitude" not in text
    with pytest.raises(ValueError, match="was not compiled with matmul='fp8'"):
        collage_neuron.explain(small())


class Odd(nn.Module):
    """Has an operation that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.erfinv(torch.tanh(self.one(x)) * 0.5))  # type: ignore[no-any-return]  # a Module's


def test_explain_names_the_operation_without_a_rule() -> None:
    model = compiled(Odd().bfloat16(), keep=())
    trained(model, batch())
    text = collage_neuron.explain(model)
    assert "two.input takes its largest magnitude in every step: aten.erfinv has no rule" in text
    assert "one.gradient takes its largest magnitude" in text
    assert "two.gradient: e5m2" in text
