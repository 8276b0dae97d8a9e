"""Low words belong to their weights: loaded, written between steps, exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints_of_both import are_alike_after
from loading_cases import adamw, compiled, ours
from models import MODES, differences, mlp, parameters, set_gradients, snapshot, train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import STRATEGIES, exact_value
from collage_neuron.numerics.formats import format_named
from collage_neuron.states import state_writes


@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_may_be_loaded_in_either_order(model_first: bool) -> None:
    model, optimizer = compiled()
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, loaded = compiled(seed=1)
    load: list[Callable[[], object]] = [lambda: other.load_state_dict(weights), lambda: loaded.load_state_dict(saved)]
    for call in load if model_first else reversed(load):
        call()
    are_alike_after((model, optimizer), (other, loaded), range(2, 4))


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32", "split433"])
def test_a_state_in_memory_restores_weights_as_often_as_it_is_loaded(strategy: str) -> None:
    """Moments of the same type share their memory with it, as torch's do; weights never do."""
    model, optimizer = compiled(strategy=strategy)
    weights, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    values = [exact_value(optimizer, p) for p in model.parameters()]
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        assert all(torch.equal(exact_value(optimizer, p), v) for p, v in zip(model.parameters(), values, strict=True))
        train(model, optimizer, range(2, 5))


@pytest.mark.parametrize("strategy", ["plus", "full", "light", "fp32"])
def test_an_optimizer_state_beside_the_weights_of_another_run_is_noticed(strategy: str) -> None:
    model, optimizer = compiled(strategy, seed=1)
    optimizer.load_state_dict(ours(strategy))
    with pytest.warns(UserWarning, match=r"low words that were loaded do not belong to the weights \(in .* % of the"):
        train(model, optimizer, [0])
    train(model, optimizer, [0])  # once


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def loaded_by_torch(weights: Any, states: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    model: nn.Module = mlp(1).to(dtype)
    optimizer = adamw(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    return model, optimizer


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
def test_what_torch_trained_on_from_a_checkpoint_of_ours_is_what_is_compiled(strategy: str) -> None:
    """Low words that an optimizer which was not compiled carried along are those of older weights."""
    model, optimizer = compiled(strategy)
    other, torchs = loaded_by_torch(model.state_dict(), optimizer.state_dict())
    train(other, torchs, range(2, 4))
    weights = [p.detach().clone() for p in other.parameters()]
    with pytest.warns(UserWarning, match="loaded the checkpoint of a compiled run and was not compiled: torch trained"):
        collage_neuron.compile(other, torchs, strategy=strategy)
    for p, w in zip(other.parameters(), weights, strict=True):
        torch.testing.assert_close(exact_value(torchs, p), w, rtol=2**-17, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_loading_before_the_line_and_after_it_is_the_same_to_the_last_bit(strategy: str, dtype: torch.dtype) -> None:
    """Or an error, where torch cast fp32 states to bf16."""
    model, optimizer = compiled(strategy)
    optimizer.zero_grad()
    weights, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 5))
    other, torchs = loaded_by_torch(weights, states, dtype)
    if is_saved_wide(strategy) and dtype == torch.bfloat16:
        with pytest.raises(ValueError, match=r"was saved in (fp32|int16), and torch cast it to bf16"):
            collage_neuron.compile(other, torchs, strategy=strategy)
        return
    collage_neuron.compile(other, torchs, strategy=strategy)
    train(other, torchs, range(2, 5))
    assert differences(snapshot(torchs), snapshot(optimizer)) == []


def is_saved_wide(strategy: str) -> bool:
    """Returns True if checkpoints have something that bf16 does not hold."""
    s = STRATEGIES[strategy]
    formats = [format_named(name) for name in (s.param, s.state, s.slow)]
    return any(fmt.is_coded or any(c.type.digits > 8 for c in fmt.components) for fmt in formats)


def test_a_strategy_that_a_checkpoint_brought_before_the_line_is_told() -> None:
    model, optimizer = compiled("plus")
    other, torchs = loaded_by_torch(model.state_dict(), optimizer.state_dict())
    with pytest.warns(UserWarning, match=r"param_groups\[0\] was compiled for strategy 'full', .* of the checkpoint"):
        collage_neuron.compile(other, torchs, strategy="full")
    assert torchs.param_groups[0]["collage_strategy"] == "plus"


def after_idle_step(p: nn.Parameter, optimizer: Optimizer) -> torch.Tensor:
    lr = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    return exact_value(optimizer, p)


def trained(strategy: str = "plus") -> tuple[nn.Parameter, Optimizer]:
    (p,) = parameters(0, ((64, 8),))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-3), strategy=strategy)
    for i in range(3):
        set_gradients([p], i)
        optimizer.step()
    return p, optimizer


def test_a_parameter_that_is_exchanged_is_noticed() -> None:
    p, optimizer = trained()
    p.data = torch.full_like(p, 2.0**-20)
    assert torch.equal(after_idle_step(p, optimizer), p.float())


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
def test_low_words_are_never_taken_for_strangers(strategy: str, arithmetic: str) -> None:
    """Not after steps that cancel most of a number either."""
    (p,) = parameters(0, ((4096,),))
    optimizer = collage_neuron.compile(SGD([p], lr=0.1, momentum=0.9), strategy=strategy, arithmetic=arithmetic)
    g = torch.Generator().manual_seed(0)
    for i in range(30):
        pull = 10 * exact_value(optimizer, p) * (1 + 2.0 ** -(i % 20) * torch.randn(p.shape, generator=g))
        p.grad = pull.bfloat16()
        optimizer.step()
        assert state_writes.belongs(optimizer, p).all()


@pytest.mark.parametrize("seed", range(2))
def test_a_low_word_belongs_if_it_is_at_most_half_an_ulp(seed: int) -> None:
    """Every bf16 number in the place of both words, and low words near half an ulp."""
    hi, g = every_bf16(), torch.Generator().manual_seed(seed)
    p = nn.Parameter(hi.clone())
    optimizer = collage_neuron.compile(SGD([p], lr=0.1))
    up, down = ((torch.nextafter(hi, torch.full_like(hi, s * torch.inf)).double() - hi.double()).abs() for s in (1, -1))
    near = (up * torch.rand(hi.shape, generator=g) * 2 * torch.randint(-1, 2, hi.shape, generator=g)).bfloat16()
    for lo in (hi[torch.randperm(2**16, generator=g)], near, (up / 2).bfloat16(), (-down / 2).bfloat16()):
        optimizer.state[p]["param_lo"] = lo
        half = torch.where(lo > 0, up, down) / 2
        assert torch.equal(state_writes.belongs(optimizer, p), (lo.double().abs() <= half) | ~hi.isfinite())
