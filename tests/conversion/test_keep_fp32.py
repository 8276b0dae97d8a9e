"""`compile(..., keep_fp32=...)`: parameters that stay fp32 among bf16 ones, their updates, and what says so."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from buffer_models import compiled
from models import equal_states, gpt
from torch import nn
from torch.optim import AdamW, Optimizer
from worlds import run_world

import collage_neuron
from collage_neuron import RoundedWeights
from collage_neuron.explanation import about


class Experts(nn.Module):
    """What users want to stay fp32: an embedding, norms, a router; and a scale of the router beside its temperature."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.input_norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 3)
        self.router.register_buffer("bias_of_load", torch.full((3,), 1.001))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(3))
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.input_norm(self.embedding(tokens))
        weights = (self.router(x) + self.router.bias_of_load.to(x.dtype)).softmax(-1)
        return self.head(sum(weights[..., i, None] * f(x) for i, f in enumerate(self.experts)))  # type: ignore[no-any-return]


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(3)) -> None:
    for i in steps:
        optimizer.zero_grad()
        model(tokens(i)).float().square().mean().backward()
        optimizer.step()


def wide(model: nn.Module) -> set[str]:
    """The modules with fp32 parameters or buffers."""
    return {name.rpartition(".")[0] for name, t in model.state_dict().items() if t.dtype == torch.float32}


NORMS = {"input_norm", *(f"experts.{i}.2" for i in range(3))}

CHOICES: dict[str, tuple[Any, set[str]]] = {
    "a name": (["input_norm"], {"input_norm"}),
    "one string": ("router", {"router"}),
    "a glob": (["*_norm", "rout*"], {"input_norm", "router"}),
    "parts of names": (["experts.1", "0.2"], {"experts.1.0", "experts.1.2", "experts.0.2"}),
    "a full name": (["embedding.weight"], {"embedding"}),
    "a class": ([nn.LayerNorm], NORMS),
    "classes and names": ((nn.LayerNorm, "router"), NORMS | {"router"}),
    "a predicate": (lambda name, p: "norm" in name and p.dim() == 1, {"input_norm"}),
    "everything": (["*"], NORMS | {"embedding", "router", "head", *(f"experts.{i}.0" for i in range(3))}),
}


@pytest.mark.parametrize("form", ["pair", "model"])
@pytest.mark.parametrize("name", CHOICES)
def test_what_is_named_stays_and_the_model_runs_unchanged(name: str, form: str) -> None:
    given, expected = CHOICES[name]
    model, optimizer = compiled(Experts(), form, keep_fp32=given, buffers="cast")
    train(model, optimizer)
    assert wide(model) == expected
    assert model(tokens()).dtype == torch.bfloat16
    assert ("router" in expected) == (model.router.bias_of_load.dtype == torch.float32)
    for p in (p for p in model.parameters() if p.dtype == torch.float32):
        assert {k: v.dtype for k, v in optimizer.state[p].items() if k != "step"} == {
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
        }
    model.eval()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(copied(tokens()), model(tokens()))


def test_a_module_of_the_model_and_its_class() -> None:
    model = Experts()
    compiled(model, keep_fp32=model.experts[1], buffers="cast")
    assert wide(model) == {"experts.1.0", "experts.1.2"}
    other = Experts()
    with pytest.raises(ValueError, match=r"keep_fp32=<Linear> matches no fp32 parameter .* is not in the model"):
        compiled(other, keep_fp32=[model.router])
    tied = gpt()
    compiled(tied, keep_fp32=["head"])  # by its second name
    assert wide(tied) == {"embedding", "head"}
    assert tied(tokens()).dtype == torch.bfloat16


@pytest.mark.parametrize("given", ["out_proj", nn.Linear])
def test_a_layer_that_reads_the_weights_of_one_in_it_stays_as_a_whole(given: Any) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, _ = compiled(model, "pair", keep_fp32=given)
    assert model(torch.randn(2, 4, 16).bfloat16()).dtype == torch.bfloat16
    assert {p.dtype for p in model.self_attn.parameters()} == {torch.float32}
    assert model.norm1.weight.dtype == torch.bfloat16


def test_they_are_updated_as_torch_updates_fp32() -> None:
    """On the same gradients, to the rounding of fp32; 20 steps that bf16 would lose, at gains of 1."""
    model, optimizer = Experts(), None
    optimizer = AdamW(model.parameters(), lr=1e-5)
    collage_neuron.compile(model, optimizer, keep_fp32=["input_norm", "router"], strategy="bf16", buffers="keep")
    left = [*model.input_norm.parameters(), *model.router.parameters()]
    twins = [nn.Parameter(p.detach().double()) for p in left]
    plain = AdamW(twins, lr=1e-5)
    for i in range(20):
        optimizer.zero_grad()
        model(tokens(i)).float().square().mean().backward()
        for p, q in zip(left, twins, strict=True):
            q.grad = p.grad.double()  # type: ignore[union-attr]
        optimizer.step()
        plain.step()
    for p, q in zip(left, twins, strict=True):
        torch.testing.assert_close(p.double(), q, rtol=20 * 2**-24, atol=20 * 1e-5 * 2**-20)


def test_explain_the_first_step_and_logs_say_so() -> None:
    model, optimizer = compiled(Experts(), keep_fp32=["input_norm"], buffers="keep", strategy="split433")
    train(model, optimizer, range(1))
    jobs = "strategy split433 (2 of the tensors stay fp32), "  # the line of the first step too
    assert jobs in collage_neuron.explain(optimizer).splitlines()[-1]
    assert "2 parameters that stay fp32" in collage_neuron.explain(optimizer)
    assert about(optimizer)["parameters_in_fp32"] == 16


def test_a_run_resumes_bit_for_bit_and_an_optimizer_that_is_compiled_again_keeps_them() -> None:
    make = partial(compiled, keep_fp32=["*norm", "router"], buffers="keep")
    model, optimizer = make(Experts())
    train(model, optimizer)
    other, resumed = make(Experts())
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    collage_neuron.compile(resumed)
    collage_neuron.compile(other, resumed, keep_fp32=["*norm", "router"], buffers="keep")
    for m, o in ((model, optimizer), (other, resumed)):
        train(m, o, range(3, 6))
    assert wide(other) == {"input_norm", "router"}
    assert equal_states(model.state_dict(), other.state_dict())


def test_a_checkpoint_of_a_run_without_it_loads_the_exact_values_and_the_other_way_is_rejected() -> None:
    model, optimizer = compiled(Experts(), buffers="keep")
    train(model, optimizer)
    exact = collage_neuron.exact_value(optimizer, model.input_norm.weight)
    assert not torch.equal(exact, model.input_norm.weight.float())
    other, resumed = compiled(Experts(), keep_fp32=["input_norm"], buffers="keep")
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(other.input_norm.weight, exact)
    with pytest.warns(RoundedWeights, match="input_norm"):
        model.load_state_dict(copy.deepcopy(other.state_dict()))
    train(other, resumed)
    with pytest.raises(ValueError, match=r"no 'param_lo'.*left this parameter in fp32 \(compile\(..., keep_fp32="):
        optimizer.load_state_dict(copy.deepcopy(resumed.state_dict()))


def test_to_bf16_after_the_line_is_told_once_and_the_model_trains_on() -> None:
    model, optimizer = compiled(Experts(), keep_fp32=["*norm", "router"], buffers="cast")
    train(model, optimizer)
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"left in float32 by compile, and is bfloat16 now.*rounded it") as told:
        train(model, optimizer)
    assert len(told) == 1
    assert wide(model) == set()


REJECTED: dict[str, tuple[Any, type[Exception], str]] = {
    "a slip": (["input_nrom"], ValueError, r"keep_fp32='input_nrom' matches no fp32 .*there are 'input_norm'.*whole p"),
    "one of two": (["router", "gate"], ValueError, r"keep_fp32='gate' matches no fp32 parameter of this Experts"),
    "a part of a name": (["norm"], ValueError, r"keep_fp32='norm' matches no fp32 .*there are 'input_norm'"),
    "a class": ([nn.Conv2d], ValueError, r"keep_fp32=Conv2d matches no fp32 parameter"),
    "another class": ([Optimizer], TypeError, r"keep_fp32 has <class '.*Optimizer'>, a type; give patterns of names"),
    "a predicate": (lambda name, p: False, ValueError, r"keep_fp32=<lambda> matches no fp32"),
    "a number": (3, TypeError, r"keep_fp32 is a int; give a list of patterns"),
    "a tensor": ([torch.ones(2)], TypeError, r"keep_fp32 has tensor.*, a Tensor; give patterns of names"),
    "a part of a layer": (
        lambda name, p: p.dim() == 1,
        ValueError,
        r"'bias' of 'router' \(Linear\), and not 'weight': the layer computes with both in one dtype",
    ),
}


@pytest.mark.parametrize("form", ["pair", "model"])
@pytest.mark.parametrize("name", REJECTED)
def test_a_choice_that_cannot_be_meant_is_rejected_and_nothing_changes(name: str, form: str) -> None:
    given, error, message = REJECTED[name]
    model = Experts()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        compiled(model, form, keep_fp32=given)
    assert equal_states(model.state_dict(), before)


def test_it_needs_the_model_and_fp32_values() -> None:
    for target in (AdamW, AdamW(Experts().parameters())):
        with pytest.raises(ValueError, match=r"keep_fp32 needs the model.*compile\(model, optimizer, keep_fp32=...\)"):
            collage_neuron.compile(target, keep_fp32=["router"])  # type: ignore[call-overload]
    model = Experts()
    collage_neuron.compile(AdamW(model.router.parameters()))  # of several optimizers; it does not know the model
    with pytest.raises(ValueError, match=r"'router.weight' is bfloat16 already.*compile\(model, keep_fp32=...\)"):
        compiled(model, keep_fp32=["router"])


def test_a_model_declares_its_parameters_and_casts_for_itself() -> None:
    """As Hugging Face's: in a bf16 model these are fp32, and the model's own code converts what they take and give."""

    class Declared(nn.Module):
        _keep_in_fp32_modules_strict = ("gate.weight",)

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = nn.functional.linear(x.float(), self.gate.weight)
            assert logits.dtype == torch.float32
            return self.last(logits.softmax(-1).to(x.dtype))  # type: ignore[no-any-return]

    model = Declared()
    compiled(model)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == {"gate.weight"}
    model(torch.ones(2, 4).bfloat16()).float().sum().backward()


def test_fp8_leaves_their_matmuls_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    collage_neuron.compile(model, AdamW(model.parameters()), keep_fp32=["2"], matmul="fp8")
    model(torch.randn(16, 16).bfloat16()).float().square().mean().backward()
    assert "as they are: 2.weight, 4.weight" in collage_neuron.explain(model)


def _sharded(wrap: bool) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Experts()
    if wrap:
        for module in (model.input_norm, model.router, model):  # groups of one dtype, as torch asks for
            fully_shard(module)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    collage_neuron.compile(model, optimizer, keep_fp32=["input_norm", "router"], buffers="keep", backend="reference")
    train(model, optimizer)
    whole = {k: v.full_tensor() if wrap and hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
    return {k: v.detach().clone() for k, v in whole.items()}


def test_shards_of_both_dtypes_end_where_one_process_ends(tmp_path: Path) -> None:
    expected = _sharded(False)
    for found in run_world(2, tmp_path, partial(_sharded, True)):
        assert {k for k, v in found.items() if v.dtype == torch.float32} == {
            "input_norm.weight", "input_norm.bias", "router.weight", "router.bias", "router.bias_of_load",
        }  # fmt: skip
        assert equal_states(found, expected)


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_checkpoint_of_a_run_without_it_is_loaded_in_either_order(first: str) -> None:
    """The low words of what stays fp32 here come with the optimizer, and the high ones with the model."""

    def made(**settings: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-5), verbose=False, **settings)

    def step(model: nn.Module, optimizer: Any) -> None:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()

    model, optimizer = made()
    for _ in range(20):
        step(model, optimizer)
    saved, wanted = [copy.deepcopy(x.state_dict()) for x in (model, optimizer)], model
    exact = collage_neuron.exact_value(optimizer, wanted[1].weight)
    model, optimizer = made(keep_fp32=["1"])
    pairs = [(model, saved[0]), (optimizer, saved[1])]
    for target, state in pairs if first == "model" else reversed(pairs):
        target.load_state_dict(state)
    optimizer.param_groups[0].update(lr=0.0)
    step(model, optimizer)
    assert torch.equal(model[1].weight, exact)
