"""Checkpoints that are refused, and what a loaded state leaves alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints_of_both import equal, farthest, in_ours, in_torch, saved_from
from models import differences, mlp, run_script, snapshot, train
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_neuron
from collage_neuron import STRATEGIES, exact_value, set_exact_value
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, set_fp32_state_dict


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
