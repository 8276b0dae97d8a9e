"""Compiling in mid-training, compiling again, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_forms import FORMS, adamw, by_both, states
from models import differences, mlp, parameters, run_script, snapshot, through_torch_save, train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value


def trained(form: str, steps: int, **settings: Any) -> tuple[nn.Module, Optimizer]:
    """A model that torch trained in fp32, compiled in the middle."""
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    target: Any = {"(model, optimizer)": (model, optimizer), "(optimizer)": (optimizer,), "(model)": (model,)}[form]
    collage_neuron.compile(*target, **settings)
    return model.bfloat16(), optimizer


@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)"])
def test_an_optimizer_compiled_in_mid_training_keeps_its_moments(form: str) -> None:
    """Split like the parameters: the sum of the words is within 2**-17 of the fp32 moment."""
    control = mlp()
    uncompiled = adamw(control)
    train(control, uncompiled, range(3))
    _, optimizer = trained(form, 3, strategy="full")
    for was, now in zip(uncompiled.state.values(), optimizer.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = now[name].double() + now[f"{name}_lo"].double()
            torch.testing.assert_close(value, was[name].double(), rtol=2**-17, atol=0)
            assert not torch.equal(now[name].float(), was[name])


def test_compiled_in_mid_training_all_forms_go_on_alike() -> None:
    found = []
    for form in FORMS:
        model, optimizer = trained(form, 3, strategy="full")
        train(model, optimizer, range(3, 5))
        assert {float(s["step"]) for s in optimizer.state.values()} == {5.0}
        found.append(snapshot(optimizer))
    assert differences(found[0], found[1]) == []
    assert differences(found[0], found[2]) == []


CHANGES = [("plus", "fp32"), ("fp32", "plus"), ("full", "light"), ("bf16", "full"), ("fp32_states", "plus")]


@pytest.mark.filterwarnings("ignore::collage_neuron.StrategyChanged")
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_compiled_optimizer_can_be_compiled_with_another_strategy(old: str, new: str) -> None:
    """Its values stay what they were up to the new format's half ulp: 2**-17 with a low word, 2**-8 without."""
    model = mlp()
    optimizer = by_both(model, strategy=old)
    train(model, optimizer, range(3))
    exact = {p: exact_value(optimizer, p) for p in model.parameters()}
    collage_neuron.compile(optimizer, strategy=new)
    optimizer.param_groups[0].update(lr=0.0)
    train(model, optimizer, [3])
    fresh = mlp()
    reference = by_both(fresh, strategy=new)
    train(fresh, reference, [0])
    assert states(optimizer) == states(reference)
    for p, value in exact.items():
        torch.testing.assert_close(exact_value(optimizer, p), value, rtol=2**-17, atol=0)


def test_a_group_added_after_compiling_anew_has_the_new_strategy() -> None:
    optimizer = collage_neuron.compile(SGD(parameters()), strategy="light")
    collage_neuron.compile(optimizer, strategy="full")
    optimizer.add_param_group({"params": parameters(dtype=torch.bfloat16)})
    assert [g["collage_strategy"] for g in optimizer.param_groups] == ["full", "full"]


def test_compiling_again_with_the_same_strategy_changes_nothing() -> None:
    model = mlp()
    optimizer = by_both(model)
    train(model, optimizer, range(2))
    before = snapshot(optimizer)
    collage_neuron.compile(model, optimizer)
    assert differences(snapshot(optimizer), before) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_torch_save])
@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)"])
def test_a_copy_made_before_the_first_step_trains_like_the_original(form: str, duplicate: Callable[[Any], Any]) -> None:
    """Its states are low words alone then."""
    model = mlp()
    optimizer = FORMS[form](model)
    model.bfloat16()
    other_model, other = duplicate((model, optimizer))
    train(model, optimizer, range(2))
    train(other_model, other, range(2))
    assert differences(snapshot(optimizer), snapshot(other)) == []


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), through_torch_save]
)
def test_a_copy_of_the_class_is_the_class(duplicate: Callable[[Any], Any]) -> None:
    compiled = collage_neuron.compile(AdamW, strategy={"param": "bf16x2"})
    assert duplicate(compiled) is compiled


def test_compiled_classes_of_torch_can_be_imported_by_name() -> None:
    from collage_neuron.optimizer import CollageSGD

    assert CollageSGD is collage_neuron.compile(SGD)


SCRIPT = """
import sys, torch
import models
model, optimizer, compiled = torch.load(sys.argv[1], weights_only=False)
assert compiled is type(optimizer) and isinstance(optimizer, torch.optim.AdamW), type(optimizer)
models.train(model, optimizer, range(2, 4))
torch.save(models.snapshot(optimizer), sys.argv[2])
"""


def test_a_pickled_optimizer_and_its_class_live_on_in_a_new_process(tmp_path: Path) -> None:
    model = mlp()
    optimizer = by_both(model, strategy="full", arithmetic="bf16")
    train(model, optimizer, range(2))
    torch.save((model, optimizer, type(optimizer)), tmp_path / "saved.pt")
    run_script(tmp_path, SCRIPT, tmp_path / "saved.pt", tmp_path / "result.pt")
    train(model, optimizer, range(2, 4))
    assert differences(torch.load(tmp_path / "result.pt", weights_only=False), snapshot(optimizer)) == []
