"""Buffers of a compiled model: what stays fp32, what becomes bf16, and what is said of it.

Models are those that people train: Hugging Face's with random weights, and small ones in the manner of others.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from images import images, loss_of, resnet
from models import equal_states, mlp, train
from torch import nn
from torch.optim import SGD, AdamW

import collage_neuron
from collage_neuron import RoundedBuffers
from collage_neuron.numerics.strategies import STRATEGIES

VOCABULARY, LENGTH = 97, 2048


def compiled(model: Any, form: str = "pair", **settings: Any) -> tuple[Any, torch.optim.Optimizer]:
    """`compile(model, optimizer)`, or `compile(model)` and an optimizer that is built afterwards."""
    if form == "pair":
        return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2), **settings)
    model = collage_neuron.compile(model, **settings)
    return model, AdamW(model.parameters(), lr=1e-2)


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in model.named_buffers()}


# --- rotary frequencies -----------------------------------------------------------------------------------------------


def llama(**settings: Any) -> nn.Module:
    """Two layers whose attention is sharp enough to depend on where the tokens are."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=1, max_position_embeddings=LENGTH, initializer_range=0.2, **settings
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def neox() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model: nn.Module = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)
    )
    return model


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    return model


class Rotary(nn.Module):
    """Of one head, applied as nanoGPT's descendants do it; the buffer's name is the library's choice."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer(name, 10000.0 ** (-torch.arange(0, width, 2) / width), persistent=False)
        self.register_buffer("scale", torch.linspace(0.3, 1, width // 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).float(), getattr(self, self.name))
        turned = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turned).flatten(-2).to(x.dtype)


class NanoGPT(nn.Module):
    """One block in nanoGPT's manner: a causal mask in a buffer, and positions by the module that is given."""

    def __init__(self, positions: nn.Module | None, width: int = 16, length: int = 32) -> None:
        super().__init__()
        self.mask: torch.Tensor
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.rotary = positions
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(self.mask[:n, :n] == 0, float("-inf"))
        logits: torch.Tensor = self.head(x + scores.softmax(-1) @ v)
        return logits


class Sinusoidal(nn.Module):
    """Positions that are added to activations: in fp32 they would widen them, and the next matmul would reject them."""

    def __init__(self, width: int = 16, length: int = 32) -> None:
        super().__init__()
        self.table: torch.Tensor
        angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


def sinusoidal() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), Sinusoidal(), nn.Linear(16, 16), nn.Linear(16, VOCABULARY))


def tokens(length: int = 24) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = {
    "Llama": (llama, tokens, ""),
    "GPT-NeoX": (neox, tokens, ""),
    "GPT-2": (gpt2, tokens, ""),
    "nanoGPT": (lambda: NanoGPT(None), tokens, ""),
    "nanoGPT, rotary": (lambda: NanoGPT(Rotary(16, "inv_freq")), tokens, ""),
    "nanoGPT, rotary of another name": (lambda: NanoGPT(Rotary(16, "theta")), tokens, ""),
    "sinusoidal": (sinusoidal, tokens, r"1\.table \(off by up to 0\.00\d+, of values up to 1\)"),
    "ResNet": (resnet, lambda: images().bfloat16(), ""),
}
"""Model, input, and what the warning says of its buffers."""


@pytest.mark.parametrize("form", ["pair", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_models_run_in_bf16_and_no_buffer_is_rounded_silently(name: str, form: str) -> None:
    make, data, warning = MODELS[name]
    model = make()
    before = {name: t.clone() for name, t in model.named_buffers()}
    if warning:
        with pytest.warns(RoundedBuffers, match=warning):
            model, optimizer = compiled(model, form)
    else:
        model, optimizer = compiled(model, form)
        assert all(torch.equal(t.to(before[n].dtype), before[n]) for n, t in model.named_buffers())
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model(data()))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} <= {torch.bfloat16, torch.float32}


def test_logits_of_a_llama_at_its_last_positions_are_off_by_what_bf16_costs_at_the_first() -> None:
    """With rounded frequencies they are not: the angle at 2047 is off by as much as .89 radians."""
    wide = llama()
    text = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    exact, rounded = copy.deepcopy(wide), copy.deepcopy(wide)
    compiled(exact)
    compiled(rounded, buffers="cast")
    with torch.no_grad():
        logits = {m: m(text).logits.double() for m in (wide, exact, rounded)}

    def error(m: nn.Module, positions: slice) -> float:
        difference = (logits[m] - logits[wide])[:, positions]
        return float(difference.norm() / logits[wide][:, positions].norm())

    first, last = slice(0, 64), slice(LENGTH - 64, LENGTH)
    assert error(exact, last) < 1.5 * error(exact, first)
    assert error(rounded, last) > 3 * error(exact, last)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 256},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    ],
)  # fmt: skip
def test_scaled_frequencies_stay(scaling: dict[str, Any]) -> None:
    model, _ = compiled(llama(rope_parameters={"rope_theta": 10000.0, **scaling}))
    assert set(dtypes(model).values()) == {torch.float32}


def test_frequencies_are_known_by_their_values_too_and_slopes_are_not_frequencies() -> None:
    rotary = Rotary(64, "omega")
    model = nn.Sequential(rotary, nn.Linear(64, 2))
    compiled(model)
    assert dtypes(model) == {"0.omega": torch.float32, "0.scale": torch.float32}  # a module that only rotates
    slopes = nn.Linear(2, 2)
    slopes.register_buffer("slopes", 2.0 ** (-8 * torch.arange(1, 17) / 16))  # ALiBi's: added to bf16 scores
    with pytest.warns(RoundedBuffers, match="slopes"):
        compiled(slopes)
    assert dtypes(slopes) == {"slopes": torch.bfloat16}


def test_what_a_model_declares_stays() -> None:
    class Declared(nn.Linear):
        _keep_in_fp32_modules_strict = ("correction_bias",)

    model = Declared(2, 2)
    model.register_buffer("correction_bias", torch.zeros(2))
    model.register_buffer("other", torch.zeros(2))
    compiled(model)
    assert dtypes(model) == {"correction_bias": torch.float32, "other": torch.bfloat16}


# --- running statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["pair", "model"])
def test_running_statistics_move_as_in_fp32(form: str) -> None:
    """In bf16 the mean stands still as soon as a tenth of the difference is less than half an ulp of it."""
    model, optimizer = compiled(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), form)
    twin = nn.BatchNorm1d(3)
    for seed in range(200):
        x = (torch.randn(64, 3, generator=torch.Generator().manual_seed(seed)) * 0.1 + 4.75).bfloat16()
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        twin(x.float())
    torch.testing.assert_close(model[0].running_mean, twin.running_mean, rtol=2**-20, atol=0)
    torch.testing.assert_close(model[0].running_var, twin.running_var, rtol=2**-8, atol=0)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (8, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
    "without weights": (lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 3, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 5, 5)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(4), (2, 4, 5, 5)),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_with_statistics_stays_fp32_as_a_whole_and_gives_what_it_gets(name: str) -> None:
    make, shape = NORMS[name]
    model: Any = nn.Sequential(make(), nn.Linear(shape[-1], 1))
    model, optimizer = compiled(model)
    assert all(t.dtype == torch.float32 for t in (*model[0].parameters(), *model[0].buffers()) if t.is_floating_point())
    for mode in (True, False):
        model.train(mode)
        assert model(torch.randn(shape).bfloat16()).dtype == torch.bfloat16
    model(torch.randn(shape).bfloat16()).float().sum().backward()
    optimizer.step()
    assert all(p.dtype == torch.float32 for p in model[0].parameters())


def test_norms_without_statistics_become_bf16() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4)
    )
    compiled(model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


class ByHand(nn.Module):
    """A norm of the user's: its arithmetic widens what it gets to the dtype of its statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.running_mean: torch.Tensor
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.running_mean) * self.weight


@pytest.mark.parametrize("form", ["pair", "model"])
def test_a_norm_of_the_users_gets_fp32_and_gives_bf16(form: str) -> None:
    model, optimizer = compiled(nn.Sequential(nn.Linear(2, 2), ByHand(2), nn.Linear(2, 1)), form)
    model, optimizer = copy.deepcopy((model, optimizer)) if form == "pair" else (model, optimizer)
    model = pickle.loads(pickle.dumps(model)) if form == "pair" else model
    x = torch.ones(3, 2).bfloat16()
    loss_of(model(x)).backward()
    optimizer.step()
    assert model(x).dtype == torch.bfloat16
    assert (model[1].running_mean.dtype, model[1].weight.dtype) == (torch.float32, torch.float32)
    compiled(model, buffers="cast")
    assert model(x).dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.bfloat16


def test_a_resnet_trains_on_xla(xla: torch.device) -> None:
    """torch_xla gives the convolution behind a batch norm fp32 numbers that it calls bf16, and XLA rejects them."""
    torch_xla = pytest.importorskip("torch_xla")
    model, optimizer = compiled(resnet().to(xla))
    twin, its = compiled(resnet())
    norm, other = model[0][1], twin[0][1]
    for i in range(3):
        for m, o, x in ((model, optimizer, images(i).to(xla)), (twin, its, images(i))):
            o.zero_grad()
            loss_of(m(x.bfloat16())).backward()
            o.step()
        torch_xla.sync()
        if i == 0:
            torch.testing.assert_close(norm.running_mean.cpu(), other.running_mean, rtol=2**-8, atol=2**-8)
    assert (norm.weight.dtype, norm.running_mean.dtype) == (torch.float32, torch.float32)
    with torch.no_grad():
        assert model.eval()(images().bfloat16().to(xla)).cpu().dtype == torch.bfloat16


class Frozen(nn.Module):
    """The batch norm of detection models: all of it buffers, by hand, so that fp32 would widen what it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.full((width,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, mean, var = self.buffers()
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def test_a_frozen_batch_norm_becomes_bf16_and_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Frozen(2), nn.Linear(2, 2))
    with pytest.warns(RoundedBuffers, match=r"1\.running_mean \(off by up to 0\.0016, of values up to 1\.1\)"):
        compiled(model)
    loss_of(model(torch.ones(3, 2).bfloat16())).backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_norms_among_bf16_layers_step_are_saved_copied_measured_and_explained(strategy: str) -> None:
    def run(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in steps:
            optimizer.zero_grad()
            loss_of(model(images(i).bfloat16())).backward()
            optimizer.step()

    model, optimizer = compiled(resnet(), strategy=strategy)
    norm = model[0][1].weight
    with collage_neuron.monitor(optimizer, model) as monitor:
        run(range(3), model, optimizer)
    assert {v.dtype for k, v in optimizer.state[norm].items() if k != "step"} == {torch.float32}
    assert "param_lo" not in optimizer.state[norm]
    assert monitor.latest().modules["0.1"].pair.lost == 0  # type: ignore[union-attr]
    assert "6 parameters that stay fp32" not in collage_neuron.explain(optimizer)
    assert "10 parameters that stay fp32" in collage_neuron.explain(optimizer)
    own = sum(p.numel() for p in model.parameters())
    wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    small = {"bf16": 8, "light": 10, "plus": 12, "full": 14, "fp32": 16, "fp32_states": 12}.get(strategy, 8)
    if strategy.startswith("split"):
        small = 2 + sum(map(int, strategy.removeprefix("split")))
    shared = sum(v.nbytes for state in optimizer.state.values() for k, v in state.items() if k.endswith("_scale"))
    expected = (wide * 16 + (own - wide) * small + shared) / own
    assert collage_neuron.bytes_per_parameter(optimizer) == pytest.approx(expected)
    other, resumed = compiled(resnet(1), strategy=strategy)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, its = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other, resumed), (copied, its)):
        run(range(3, 6), m, o)
    for m in (other, copied):
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), m.state_dict().values(), strict=True))
        assert {k: v.dtype for k, v in m.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}


def test_fp32_norms_are_updated_as_torch_does() -> None:
    model, optimizer = compiled(resnet())
    norm = model[0][1]
    twins = [nn.Parameter(p.detach().clone()) for p in norm.parameters()]
    plain = AdamW(twins, lr=1e-2)
    for i in range(20):
        optimizer.zero_grad()
        loss_of(model(images(i).bfloat16())).backward()
        for p, q in zip(norm.parameters(), twins, strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        plain.step()
    for p, q in zip(norm.parameters(), twins, strict=True):
        torch.testing.assert_close(p, q, rtol=2**-20, atol=2**-24)


@pytest.mark.parametrize("buffers", ["auto", "keep"])
def test_bf16_weights_beside_fp32_statistics_are_rejected(buffers: str) -> None:
    model = resnet()
    first, second = SGD(model[0].parameters()), SGD(model[1].parameters())
    collage_neuron.compile(first)  # does not know the model
    with pytest.raises(ValueError, match=r"'0\.1' \(BatchNorm2d\) has bfloat16 weights beside float32 running stat"):
        collage_neuron.compile(model, second, buffers=buffers)
    assert model[1].first.weight.dtype == torch.float32
    collage_neuron.compile(model, second, buffers="cast")
    loss_of(model(images().bfloat16())).backward()


def test_two_optimizers_over_a_model_with_norms() -> None:
    model = resnet()
    optimizers = SGD(model[0].parameters(), lr=0.1), SGD([p for m in model[1:] for p in m.parameters()], lr=0.1)
    collage_neuron.compile(model)
    for i in range(2):
        loss_of(model(images(i).bfloat16())).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert {p.dtype for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()} == {
        torch.float32
    }


def test_an_fp32_checkpoint_loads_into_what_stays_without_rounding() -> None:
    model, _ = compiled(resnet())
    saved = {k: v + 0.1 if v.is_floating_point() else v for k, v in resnet(1).state_dict().items()}
    model.load_state_dict(saved)
    assert torch.equal(model[0][1].running_mean, saved["0.1.running_mean"])
    assert torch.equal(model[0][1].weight, saved["0.1.weight"])


def test_what_stays_fp32_stays_so_when_the_optimizer_is_compiled_again() -> None:
    model, optimizer = compiled(resnet(), strategy="light")
    collage_neuron.compile(model, optimizer, strategy="light")
    collage_neuron.compile(optimizer, strategy="light")
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    collage_neuron.compile(optimizer, strategy="light")
    loss_of(model(images().bfloat16())).backward()
    optimizer.step()
    assert model[0][1].weight.dtype == torch.float32
    collage_neuron.compile(model, optimizer, strategy="light", buffers="cast")
    loss_of(model(images().bfloat16())).backward()
    optimizer.step()
    assert model[0][1].weight.dtype == torch.bfloat16


# --- the choice, and what is said -------------------------------------------------------------------------------------


def test_buffers_may_all_stay_or_all_be_cast() -> None:
    model: nn.Module = sinusoidal()
    compiled(model, buffers="keep")
    assert dtypes(model) == {"1.table": torch.float32}
    with pytest.raises(RuntimeError, match="dtype"):
        model(tokens())
    model = nn.Sequential(sinusoidal(), Rotary(16, "inv_freq"), nn.BatchNorm1d(3))
    compiled(model, buffers="cast")
    assert {t.dtype for t in model.buffers() if t.is_floating_point()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("form", ["pair", "model"])
def test_an_unknown_choice_changes_nothing(form: str) -> None:
    model = sinusoidal()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="unknown buffers 'all'; choose one of auto, keep, cast"):
        compiled(model, form, buffers="all")
    assert equal_states(model.state_dict(), before)


@pytest.mark.parametrize("target", [AdamW, SGD(mlp().parameters())])
def test_the_choice_needs_a_model(target: Any) -> None:
    with pytest.raises(ValueError, match="buffers='keep' needs the model, and without it no buffer is changed"):
        collage_neuron.compile(target, buffers="keep")


@pytest.mark.parametrize("form", ["pair", "model"])
def test_a_warning_that_is_made_an_error_leaves_the_model_as_it_was(form: str) -> None:
    model = sinusoidal()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RoundedBuffers, match="Pass buffers='keep' to leave every buffer in fp32"):
        compiled(model, form)
    assert equal_states(model.state_dict(), before)


def test_one_warning_names_all_and_points_at_the_caller() -> None:
    model = nn.Sequential(*(Sinusoidal() for _ in range(3)), nn.Linear(16, 1))
    model.register_buffer("bias", torch.tensor([torch.finfo(torch.float32).min, 0]))
    with pytest.warns(RoundedBuffers) as seen:
        collage_neuron.compile(model)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert r"bias (-3.4e+38 becomes infinite); *.table (3 of them, each off by" in str(seen[0].message)


def test_values_that_bf16_holds_and_other_dtypes_change_without_a_word() -> None:
    model = mlp()
    given = {
        "mask": torch.tensor([0.0, 1.0, float("-inf"), float("nan"), 255.0]),
        "count": torch.tensor(2**40),
        "seen": torch.tensor([True]),
        "turned": torch.polar(torch.ones(3), torch.arange(3.0)),
        "wide": torch.tensor([0.1], dtype=torch.float64),
    }
    for name, t in given.items():
        model.register_buffer(name, t.clone())
    model, optimizer = compiled(model)
    train(model, optimizer, [0])
    found = dict(model.named_buffers())
    assert found.pop("mask").dtype == torch.bfloat16
    assert all(torch.equal(t, given[name]) and t.dtype == given[name].dtype for name, t in found.items())


def test_a_buffer_of_two_modules_stays_one() -> None:
    rotary: Any = Rotary(8, "inv_freq")
    model: Any = nn.ModuleList([rotary, nn.Linear(2, 2), Rotary(8, "inv_freq")])
    model[1].register_buffer("table", rotary.inv_freq)
    compiled(model)
    assert model[1].table is rotary.inv_freq
    assert rotary.inv_freq.dtype == torch.float32
