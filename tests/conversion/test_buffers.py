"""Buffers of a compiled model: which become bf16, what stays fp32, and what is said of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffer_models import (
    LENGTH,
    VOCABULARY,
    Rotary,
    Sinusoidal,
    compiled,
    dtypes,
    images,
    loss_of,
    resnet,
    sinusoidal,
    tokens,
)
from models import equal_states, mlp
from torch import nn
from torch.optim import SGD, AdamW

import collage_neuron
from collage_neuron import RoundedBuffers

# --- buffers of a compiled model: what stays fp32, what becomes bf16, and what is said of it --------------------------

# Models are those that people train: Hugging Face's with random weights, and small ones in the manner of others.


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], str]] = {
    "Llama": (llama, tokens, ""),
    "GPT-NeoX": (neox, tokens, ""),
    "GPT-2": (gpt2, tokens, ""),
    "nanoGPT": (lambda: NanoGPT(None), tokens, ""),
    "nanoGPT, rotary": (lambda: NanoGPT(Rotary(16, "inv_freq")), tokens, ""),
    "nanoGPT, rotary of another name": (lambda: NanoGPT(Rotary(16, "theta")), tokens, ""),
    "sinusoidal": (sinusoidal, tokens, r"cannot hold their values: 1\.table\. Pass"),
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


# --- which buffers become bf16, and what is said of it ----------------------------------------------------------------


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
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"buffers": "all"}, ValueError, "unknown buffers 'all'; choose one of auto, keep, cast"),
        ({}, RoundedBuffers, "Pass buffers='keep' to leave every buffer in fp32"),
    ],
)
def test_an_unknown_choice_or_error_is_harmless(settings: dict[str, Any], error: Any, message: str, form: str) -> None:
    model = sinusoidal()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        compiled(model, form, **settings)
    assert equal_states(model.state_dict(), before)


@pytest.mark.parametrize("target", [AdamW, SGD(mlp().parameters())])
def test_the_choice_needs_a_model(target: Any) -> None:
    with pytest.raises(ValueError, match="buffers='keep' needs the model, and without it no buffer is changed"):
        collage_neuron.compile(target, buffers="keep")


def test_one_warning_names_all_and_points_at_the_caller() -> None:
    model = nn.Sequential(*(Sinusoidal() for _ in range(3)), nn.Linear(16, 1))
    model.register_buffer("bias", torch.tensor([torch.finfo(torch.float32).min, 0]))
    with pytest.warns(RoundedBuffers) as seen:
        collage_neuron.compile(model)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert "cannot hold their values: bias, 0.table, 1.table, 2.table. Pass" in str(seen[0].message)
