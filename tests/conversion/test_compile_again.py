"""Compiling in mid-training, compiling again, and copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compile_forms import adamw, by_both
from models import differences, mlp, snapshot, through_torch_save, train
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron


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


def test_compiling_again_with_the_same_strategy_changes_nothing() -> None:
    model = mlp()
    optimizer = by_both(model)
    train(model, optimizer, range(2))
    before = snapshot(optimizer)
    collage_neuron.compile(model, optimizer)
    assert differences(snapshot(optimizer), before) == []


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x)), through_torch_save]
)
def test_a_copy_of_the_class_is_the_class(duplicate: Callable[[Any], Any]) -> None:
    compiled = collage_neuron.compile(AdamW, strategy={"param": "bf16x2"})
    assert duplicate(compiled) is compiled


def test_compiled_classes_of_torch_can_be_imported_by_name() -> None:
    from collage_neuron.optimizer import CollageSGD

    assert CollageSGD is collage_neuron.compile(SGD)
