"""Updates and classes that cannot be rewritten: a sentence that points at the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import set_gradients
from refused_updates import UNSUPPORTED, Acts, grad, matrices, refused, step_is_refused
from torch import nn
from torch.optim import SGD, Muon, Optimizer, SparseAdam

import collage_neuron
from collage_neuron import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_update_that_cannot_be_rewritten_is_refused(name: str) -> None:
    act, message = UNSUPPORTED[name]
    refused(Acts(matrices(), act), UnsupportedUpdate, message)


@pytest.mark.parametrize("name", ["norm", "noise", "erfinv"])
@pytest.mark.parametrize("form", ["(model)", "(OptimizerClass)"])
def test_the_forms_without_an_optimizer_refuse_it_at_the_first_step(name: str, form: str) -> None:
    act, message = UNSUPPORTED[name]
    model = nn.Linear(8, 8, bias=False)
    if form == "(model)":
        optimizer: Optimizer = Acts(collage_neuron.compile(model).parameters(), act)
    else:
        optimizer = collage_neuron.compile(Acts)(model.bfloat16().parameters(), act)
    set_gradients(list(model.parameters()), 0)
    step_is_refused(optimizer, UnsupportedUpdate, message)


TORCH: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "Muon": (
        Muon,
        r"Muon cannot be compiled: aten._to_copy.default makes .* torch.bfloat16.*/torch/optim/_muon.py:\d+\)$",
    ),
    "SparseAdam": (SparseAdam, r"SparseAdam cannot be compiled: .*does not support dense gradients"),
}


@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_that_are_not_elementwise_are_refused(name: str) -> None:
    make, message = TORCH[name]
    refused(make(matrices()), UnsupportedUpdate, message)


class Calls(Optimizer):
    """Its step calls `act` with the optimizer and the parameter."""

    def __init__(self, params: Any, act: Callable[[Optimizer, torch.Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.act = act

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.act(self, p)


class AfterANorm(SGD):
    """Steps as its base does, scaled."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            grad(p).div_(grad(p).std())  # AfterANorm
        super().step()


NOT_SPLIT = r"clip \(torch.nn.utils.clip_grad_norm_\) and log outside step\(\)"

POINTED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "norm": (
        lambda params: Calls(params, lambda o, p: p.div_(grad(p).std())),  # norm
        NOT_SPLIT,
    ),
    "logging": (
        lambda params: Calls(params, lambda o, p: str(p.abs().max())),  # logging
        "its memory is read",
    ),
    "no rule": (
        lambda params: Calls(params, lambda o, p: p.copy_(p.erfinv())),  # no rule
        r"aten.erfinv.default .* has no rule",
    ),
    "no rule, again": (  # another line with the same recording
        lambda params: Calls(params, lambda o, p: p.copy_(p.erfinv())),  # no rule, again
        r"aten.erfinv.default .* has no rule",
    ),
    "AfterANorm": (AfterANorm, NOT_SPLIT),
}


@pytest.mark.parametrize("name", POINTED)
def test_a_refusal_points_at_the_line_of_the_users_own_step(name: str) -> None:
    make, message = POINTED[name]
    lines = Path(__file__).read_text().splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {name}"))
    refused(make(matrices()), UnsupportedUpdate, rf"{message}.* \(at {re.escape(__file__)}:{line}\)$")


class Normed(Optimizer):
    """By default it divides by the norm of the gradient."""

    def __init__(self, params: Any, norm: bool = True) -> None:
        super().__init__(params, {"lr": 0.1, "norm": norm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(grad(p) / grad(p).std() if self.param_groups[0]["norm"] else grad(p), alpha=0.1)


def test_a_class_whose_defaults_are_refused_can_be_compiled_with_others() -> None:
    class Elementwise(Normed):
        def __init__(self, params: Any, norm: bool = False) -> None:
            super().__init__(params, norm)

    for optimizer in (
        collage_neuron.compile(Normed(matrices(), norm=False)),
        collage_neuron.compile(Elementwise)(matrices(torch.bfloat16)),
    ):
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()


class WantsTraining(Normed):
    """As schedule-free optimizers, it steps in training mode alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, norm=False)
        self.training = False

    def train(self) -> None:
        self.training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.training:
            raise RuntimeError("not in train mode")
        super().step()


class Unprepared(SGD):
    """Has to be given something before it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never gets that far
        raise RuntimeError("call prepare() first")


@pytest.mark.parametrize("base", [Acts, Unprepared, WantsTraining])
def test_a_class_that_cannot_be_tried_is_not_refused(base: Any) -> None:
    """Takes more than parameters, raises an error of its own, or steps in training mode alone."""
    collage_neuron.compile(base)
