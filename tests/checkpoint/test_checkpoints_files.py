"""Checkpoints for another strategy and in files; those that are rejected, and what a loaded state leaves alone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_written import Shampoo
from checkpoints_of_both import adamw, are_alike_after, equal, farthest, in_ours, in_torch, saved_from
from models import differences, mlp, run_script, snapshot, through_torch_save, train
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_neuron
from collage_neuron import STRATEGIES, StrategyChanged, exact_value, set_exact_value
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, set_fp32_state_dict
from collage_neuron.checkpoint.named_tensors import from_tensors, to_tensors

# --- checkpoints for another strategy, and in files -------------------------------------------------------------------


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


def test_what_safetensors_has_no_place_for_is_an_error() -> None:
    """Shampoo's preconditioners in a list, and one tensor that is two states."""
    model, x = mlp(), torch.ones(2)
    optimizer = collage_neuron.compile(Shampoo(model.parameters()), verbose=False)
    train(model, optimizer, range(2))
    with pytest.raises(ValueError, match=r"(?s)state.0.sides is .*: not a number, .*: save the state by torch"):
        to_tensors(optimizer.state_dict())
    with pytest.raises(ValueError, match="a tensor is the state of several parameters"):
        to_tensors({"state": {0: {"m": x}, 1: {"m": x}}, "param_groups": [{"params": [0, 1]}]})


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
        (
            {},
            {"state.0.sides": "[{'collage tensor': 'state.0.sides.0'}]"},
            "'state.0.sides' has .* as version 0.3 wrote",
        ),
        ({"weight": torch.ones(2)}, None, "'weight' is not part of an optimizer's state"),  # a file without metadata
    ],
)
def test_names_that_we_did_not_write_are_refused(tensors: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_tensors(tensors, metadata)


# --- checkpoints that are refused, and what a loaded state leaves alone -----------------------------------------------


def test_an_optimizer_that_is_not_compiled_is_refused() -> None:
    model, optimizer = in_torch()
    for call in (
        lambda: get_fp32_state_dict(model, optimizer),
        lambda: set_fp32_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={}),
        lambda: set_exact_value(optimizer, next(model.parameters()), torch.zeros(())),
    ):
        with pytest.raises(TypeError, match=r"AdamW is not compiled; pass it to collage_neuron.compile first"):
            call()


def test_of_several_optimizers_one_is_given_and_none_may_wait() -> None:
    model: Any = mlp()
    last, first_of_two = AdamW(model[4].parameters()), AdamW(model[:4].parameters())
    collage_neuron.compile(model)
    train(model, last, [0])
    with pytest.raises(TypeError, match="optimizer is a list; give one compiled optimizer: those of the other"):
        get_fp32_state_dict(model, [first_of_two, last])  # type: ignore[arg-type]
    for call in (
        lambda: get_fp32_state_dict(model, last),
        lambda: set_fp32_state_dict(model, last, model_state_dict={}, optim_state_dict={}),
        lambda: collage_neuron.AveragedModel(model, last).update_parameters(model),
    ):
        with pytest.raises(TypeError, match=r"AdamW is not compiled yet: after compile\(model\) an optimizer is"):
            call()
    first_of_two.step()
    assert torch.equal(get_fp32_state_dict(model, last)[0]["0.weight"], exact_value(first_of_two, model[0].weight))


MODELS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "missing weight": (
        (lambda weights, states: weights.pop("2.weight")),
        r"model's state was not loaded, and nothing was changed: it has no '2.wei",
    ),
    "extra weight": (lambda w, s: w.update(extra=torch.ones(1)), r"the model has no 'extra'"),
    "shape": (lambda w, s: w.update({"0.bias": torch.ones(3)}), r"'0.bias' has shape \[3\] and in the model \[16\]"),
    "no tensor": (lambda w, s: w.update({"0.bias": "x"}), r"'0.bias' is a str and in the model a tensor"),
    "range": (lambda w, s: w["0.bias"].fill_(3.4e38), r"two words cannot hold it; nothing was written"),
    "missing state": (lambda w, s: s["state"][1].pop("exp_avg"), r"state\[1\] has no 'exp_avg', which AdamW needs"),
    "one of ours": (
        lambda w, s: s["param_groups"][0].update(collage_strategy="plus"),
        r"one of a compiled optimizer .* load it with optimizer.load_state_dict",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_checkpoint_is_loaded_whole_or_not_at_all(name: str) -> None:
    change, message = MODELS[name]
    weights, states = saved_from(*in_torch())
    change(weights, states)
    model, optimizer = in_ours(seed=1)
    before, buffers = snapshot(optimizer), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        set_fp32_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert differences(snapshot(optimizer), before) == []
    assert equal(dict(model.state_dict()), dict(buffers))


def test_exact_values_are_written_whole_or_not_at_all() -> None:
    model, optimizer = in_ours()
    p = next(model.parameters())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"parameter of shape \[16, 6\] and the value has \[3\]; nothing was written"):
        set_exact_value(optimizer, p, torch.ones(3))
    with pytest.raises(ValueError, match=r"parameter of shape \[2\] belongs to no group of the optimizer; nothing was"):
        set_exact_value(optimizer, nn.Parameter(torch.ones(2)), torch.ones(2))
    assert differences(snapshot(optimizer), before) == []
    value = torch.linspace(0.1, 1.9, p.numel()).view(p.shape)
    set_exact_value(optimizer, p, value)
    torch.testing.assert_close(exact_value(optimizer, p), value, rtol=2**-17, atol=0)
    assert not torch.equal(p.float(), exact_value(optimizer, p))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exact_value_may_be_a_number(strategy: str) -> None:
    model, optimizer = in_ours(strategy)
    p = next(model.parameters())
    for number in (1.0, 3, 1 / 3):
        set_exact_value(optimizer, p, number)
        torch.testing.assert_close(exact_value(optimizer, p), torch.full(p.shape, float(number)), rtol=2**-8, atol=0)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="the value is a str and no tensor or number; nothing was written"):
        set_exact_value(optimizer, p, "1.0")  # type: ignore[arg-type]
    assert differences(snapshot(optimizer), before) == []


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize("number", [1e39, -1e39, 3.4e38, float("inf")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exact_value_beyond_the_range_is_rejected_or_infinite_and_never_nan(strategy: str, number: float) -> None:
    model, optimizer = in_ours(strategy)
    p = next(model.parameters())
    before = snapshot(optimizer)
    for value in (number, torch.full(p.shape, number, dtype=torch.float64)):
        if strategy in ("light", "plus", "full"):
            with pytest.raises(ValueError, match=r"infinite, or is so in bf16 .*two words cannot hold it; nothing was"):
                set_exact_value(optimizer, p, value)
            assert differences(snapshot(optimizer), before) == []
        else:
            set_exact_value(optimizer, p, value)
            assert torch.equal(p.detach(), torch.full(p.shape, number, dtype=torch.float64).bfloat16())
            assert not exact_value(optimizer, p).isnan().any()


@pytest.mark.filterwarnings("ignore::collage_neuron.RoundedAverage")
def test_an_average_of_exact_values_is_one_in_fp32_and_an_averaged_model_is_not() -> None:
    """A step of fp32 rounds thrice, each time by 2**-24 of at most the largest weight M: 3 * n * 2**-24 * M in n."""
    n, weight = 100, 1 - 0.999
    model, optimizer = in_ours()
    params = list(model.parameters())
    average = [exact_value(optimizer, p) for p in params]
    wide, largest = [a.double() for a in average], 0.0
    in_bf16 = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    in_bf16.update_parameters(model)  # copies
    for i in range(n):
        train(model, optimizer, [i])
        in_bf16.update_parameters(model)
        for a, w, p in zip(average, wide, params, strict=True):
            value = exact_value(optimizer, p)
            a.lerp_(value, weight)
            w += weight * (value.double() - w)
            largest = max(largest, float(value.abs().max()), float(w.abs().max()))
    bound = 3 * n * 2**-24 * largest
    assert farthest(average, wide) <= bound
    assert farthest([p.detach() for p in in_bf16.module.parameters()], wide) > 10 * bound


XLA = """
import sys, torch, torch_xla
device = torch_xla.device()
import collage_neuron
from collage_neuron.checkpoint import get_fp32_state_dict, set_fp32_state_dict
from models import mlp, train
weights, states = torch.load(sys.argv[1])
for strategy in ("full", "fp32"):
    model = mlp(1).to(device)
    model, optimizer = collage_neuron.compile(model, torch.optim.AdamW(model.parameters()), strategy=strategy)
    set_fp32_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    found = get_fp32_state_dict(model, optimizer)
    assert {t.device.type for t in found[0].values()} == {"cpu"}
    torch.save(found, sys.argv[2] + strategy)
"""


def test_fp32_checkpoints_go_through_xla_as_through_the_cpu(xla: torch.device, tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = saved_from(model, optimizer)
    torch.save(saved, tmp_path / "saved.pt")
    run_script(tmp_path, XLA, tmp_path / "saved.pt", tmp_path / "found.")
    for strategy in ("full", "fp32"):
        other = mlp(1)
        other, compiled = collage_neuron.compile(other, AdamW(other.parameters()), strategy=strategy)
        set_fp32_state_dict(other, compiled, model_state_dict=saved[0], optim_state_dict=saved[1])
        assert equal(torch.load(tmp_path / f"found.{strategy}"), get_fp32_state_dict(other, compiled))
