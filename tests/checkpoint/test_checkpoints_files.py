"""Checkpoints for another strategy, and in files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_written import Shampoo
from checkpoints_of_both import adamw, are_alike_after, equal, in_ours, saved_from
from models import mlp, through_torch_save, train
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import STRATEGIES, StrategyChanged, exact_value
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict
from collage_neuron.checkpoint.named_tensors import from_tensors, to_tensors


def resumed_with(strategy: str, weights: Any, states: Any) -> tuple[nn.Module, Optimizer, str]:
    """A run that is gone on with under another strategy, and what was said about that."""
    model, optimizer = in_ours(states["param_groups"][0]["collage_strategy"], steps=0, seed=1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    with pytest.warns(StrategyChanged) as said:
        collage_neuron.compile(optimizer, strategy=strategy)
    return model, optimizer, str(said[0].message)


def test_a_run_may_be_gone_on_with_under_another_strategy_and_hears_what_that_means() -> None:
    model, optimizer = in_ours("bf16")
    for strategy, told in (
        ("plus", r"from 10 to 14 .*Gained: param in bf16x2 instead of bf16 \(rounded to 2\*\*-17 instead of 2\*\*-8\)"),
        ("fp32", r"from 14 to 20 .*Gained: param in bf16\+fp32 .* exp_avg in fp32 .* Lost: nothing, every value is"),
    ):
        before = get_fp32_state_dict(model, optimizer)
        model, optimizer, message = resumed_with(strategy, *saved_from(model, optimizer))
        assert re.search(told, message)
        assert equal(get_fp32_state_dict(model, optimizer), before)  # gaining words changes no value
        train(model, optimizer, range(3, 6))
    model, optimizer, message = resumed_with("light", *saved_from(model, optimizer))
    lost = r"from 20 to 12 .*Gained: nothing. Lost: param in bf16x2 .*exp_avg in bf16 instead of fp32"
    assert re.search(lost, message)


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
def test_switched_before_the_first_step_the_words_of_the_fp32_weights_are_kept(strategy: str) -> None:
    model = mlp()
    exact = [p.detach().clone() for p in model.parameters()]
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy="full")
    collage_neuron.compile(optimizer, strategy=strategy)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [0])
    for p, x in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), x, rtol=2**-17, atol=0)


def through_safetensors(states: dict[str, Any], folder: Path) -> dict[str, Any]:
    safetensors = pytest.importorskip("safetensors")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors, metadata = to_tensors(states)
    save_file(tensors, folder / "optimizer.safetensors", metadata)
    with safetensors.safe_open(folder / "optimizer.safetensors", "pt") as file:
        return from_tensors({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118


Through = Callable[[dict[str, Any], Path], dict[str, Any]]


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize(
    "through", [through_safetensors, lambda states, _: through_torch_save(states, weights_only=True)]
)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "mapping"])
def test_a_checkpoint_goes_through_a_file_bit_for_bit(strategy: str, through: Through, tmp_path: Path) -> None:
    chosen: Any = {"param": "bf16x2", "exp_avg_sq": "fp32", "*": "bf16"} if strategy == "mapping" else strategy
    model, optimizer = in_ours(chosen)
    weights, states = saved_from(model, optimizer)
    other, compiled = in_ours(chosen, steps=0, seed=1)
    other.load_state_dict(weights)
    compiled.load_state_dict(through(states, tmp_path))
    are_alike_after((model, optimizer), (other, compiled), range(3, 5))


def test_tensors_and_numbers_of_a_group_go_through_safetensors(tmp_path: Path) -> None:
    """A learning rate that is a tensor, betas that are a tuple, names, the float 1e-300."""
    model = mlp()
    optimizer = AdamW(model.named_parameters(), lr=torch.tensor(1e-2), eps=1e-300)
    collage_neuron.compile(model, optimizer)
    train(model, optimizer, range(2))
    states = optimizer.state_dict()
    assert equal(through_safetensors(states, tmp_path), states)


def test_tensors_in_containers_go_through_safetensors(tmp_path: Path) -> None:
    """Shampoo's preconditioners in a list, their roots in a dictionary by number, and names that look like them."""
    model = mlp()
    optimizer = collage_neuron.compile(Shampoo(model.parameters()), verbose=False)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    saved["state"][0]["sides.0"] = torch.ones(3)
    saved["state"][0]["both"] = (saved["state"][0]["sides"][0], {"of": [torch.zeros(2)], 3: 1.5})
    found = through_safetensors(saved, tmp_path)
    assert equal(found, saved)
    assert type(found["state"][0]["both"]) is tuple


def test_a_tensor_of_a_container_that_is_missing_is_named() -> None:
    tensors, metadata = to_tensors({"state": {0: {"sides": [torch.ones(2)]}}, "param_groups": [{"params": [0]}]})
    assert tensors.keys() == {"state.0.sides.0"}
    with pytest.raises(ValueError, match=r"'state.0.sides' has the tensor 'state.0.sides.0', which is missing"):
        from_tensors({}, metadata)
    with pytest.raises(ValueError, match="a dictionary with the key 'collage tensor'"):
        to_tensors({"state": {}, "param_groups": [{"params": [], "x": {"collage tensor": "state.0.m"}}]})


def test_what_is_no_literal_and_no_state_is_named() -> None:
    with pytest.raises(ValueError, match=r"no 'state'; found '0.weight', .*: is it an optimizer's state_dict\(\)\?"):
        to_tensors(mlp().state_dict())
    with pytest.raises(ValueError, match=r"param_groups.0.schedule is <.*>: not a number, a text, or a list, tuple"):
        to_tensors({"state": {}, "param_groups": [{"params": [], "schedule": object()}]})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"model.weight": torch.ones(2)}, {}, "'model.weight' is not part of an optimizer's state"),
        ({"state.x.exp_avg": torch.ones(2)}, {}, "'state.x.exp_avg' is not part of an optimizer's state"),
        ({"state.0": torch.ones(2)}, {}, "'state.0' is not part of an optimizer's state"),
        ({"state.0.step": torch.ones(2)}, {"param_groups.0.params": "[]"}, "state.0 belongs to none of the param_grou"),
        ({}, {"param_groups.0.lr": "__import__('os')"}, r"'param_groups.0.lr' is .*, which is not a Python literal"),
        ({"weight": torch.ones(2)}, None, "'weight' is not part of an optimizer's state"),  # a file without metadata
    ],
)
def test_names_that_we_did_not_write_are_refused(tensors: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_tensors(tensors, metadata)
