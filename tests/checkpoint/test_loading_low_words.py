"""Low words belong to their weights: loaded, written between steps, exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoints_of_both import are_alike_after
from loading_cases import adamw, compiled
from models import MODES, differences, first, mlp, parameters, set_gradients, snapshot, train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value, set_exact_value
from collage_neuron.checkpoint import get_fp32_state_dict
from collage_neuron.numerics.strategies import DEFAULT
from collage_neuron.states import state_writes


def through_plain_fp32(saved: dict[str, Any]) -> dict[str, Any]:
    """The same from an optimizer of torch that has loaded it, which casts words that it does not know."""
    plain = adamw(mlp())
    plain.load_state_dict(saved)
    return plain.state_dict()


@pytest.mark.parametrize(
    ("strategy", "through"), [(DEFAULT, copy.deepcopy), ("plus", copy.deepcopy), ("plus", through_plain_fp32)]
)
@pytest.mark.parametrize("model_first", [True, False])
def test_model_and_optimizer_may_be_loaded_in_either_order(model_first: bool, strategy: str, through: Any) -> None:
    model, optimizer = compiled(strategy)
    weights, saved = copy.deepcopy(model.state_dict()), through(optimizer.state_dict())
    other, loaded = compiled(strategy, seed=1)
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


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("seed", range(2))
def test_a_master_belongs_if_it_rounds_to_the_weight(seed: int) -> None:
    """Masters of all bits beside every bf16 number, those that round to it among them."""
    hi = every_bf16()
    drawn = torch.randint(-(2**31), 2**31, hi.shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    near = hi.view(torch.int16).int() * 2**16 + drawn % 2**17 - 2**16  # less than two bf16 away
    for bits_of_master in (drawn, near):
        master = bits_of_master.view(torch.float32)
        for weight in (hi, master.bfloat16()):
            p = nn.Parameter(weight.clone())
            optimizer = collage_neuron.compile(SGD([p], lr=0.1), strategy="fp32")
            optimizer.state[p]["param_master"] = master
            fits = (master.bfloat16() == weight) | ~weight.isfinite()
            assert torch.equal(state_writes.belongs(optimizer, p), fits)


def loaded_by_torch(weights: Any, states: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Optimizer]:
    model: nn.Module = mlp(1).to(dtype)
    optimizer = adamw(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["plus", "split433", "split422", "fp32", "bf16"])
def test_a_checkpoint_that_was_loaded_before_the_line_is_an_error(strategy: str, dtype: torch.dtype) -> None:
    model, optimizer = compiled(strategy)
    other, torchs = loaded_by_torch(model.state_dict(), optimizer.state_dict(), dtype)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(
        ValueError, match=r"loaded the checkpoint of a compiled run .* nothing was changed: compile first"
    ):
        collage_neuron.compile(other, torchs, strategy=strategy)
    assert all(torch.equal(p, x) for p, x in zip(other.parameters(), before, strict=True))


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


def test_a_parameter_that_is_exchanged_is_within_half_an_ulp() -> None:
    p, optimizer = trained()
    p.data = torch.full_like(p, 2.0**-20)
    assert (after_idle_step(p, optimizer) - 2.0**-20).abs().max() <= 2.0**-28


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


def test_a_refused_step_leaves_low_words_alone() -> None:
    model, optimizer = compiled()
    model.load_state_dict(mlp(1).bfloat16().state_dict())
    before = snapshot(optimizer)
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match="nothing was updated"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-2
    assert differences(snapshot(optimizer), before) == []


def test_nothing_is_asked_of_the_device_between_ordinary_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers a parameter are compared on the host; words are looked at only where those differ."""
    model, optimizer = compiled("plus")
    monkeypatch.setattr(state_writes, "belongs", lambda *_: pytest.fail("looked at the words"))
    train(model, optimizer, range(2))
    with torch.no_grad():
        first(model).mul_(0.5)  # a step reads no more out of a low word than fits
    train(model, optimizer, [2])
    optimizer.state[first(model)]["exp_avg_sq"].mul_(0.5)
    with pytest.raises(pytest.fail.Exception, match="looked at the words"):
        train(model, optimizer, [3])


def exchange(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "another layout": lambda model: model.apply(lambda m: m.to(memory_format=torch.channels_last)),  # type: ignore[call-overload]
    "shared memory": lambda model: model.share_memory(),
    "p.data": exchange,
}


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("strategy", ["plus", "fp32", "split433"])
def test_memory_that_is_exchanged_costs_no_low_word(how: str, strategy: str) -> None:
    """Before the first step and after it."""
    model = nn.Conv2d(3, 4, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = collage_neuron.compile(SGD(model.parameters(), lr=0.0), strategy=strategy)
    MOVES[how](model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), value, rtol=2**-16, atol=0)
        set_exact_value(optimizer, p, torch.full(p.shape, 1.001))
    optimizer.step()
    MOVES[how](model)
    optimizer.step()
    assert all(bool((exact_value(optimizer, p) - 1.001).abs().max() < 2**-14) for p in model.parameters())


@pytest.mark.parametrize("strategy", ["split433", "fp32"])
def test_an_export_drops_nothing_of_weights_that_came_and_went(strategy: str) -> None:
    model, optimizer = compiled(strategy)
    train(model, optimizer, range(2))
    values = {p: exact_value(optimizer, p) for p in model.parameters()}
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    own = {p: p.detach().clone() for p in values}
    with torch.no_grad():
        for p in own:
            p.mul_(0.5)
        get_fp32_state_dict(model, optimizer)
        for p, x in own.items():
            p.copy_(x)
    assert all(torch.equal(exact_value(optimizer, p), value) for p, value in values.items())
