"""What `step()` and `compile` reject of gradients, groups, updates and classes: a sentence, and nothing is changed."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, set_gradients, snapshot
from refused_updates import READING, UNSUPPORTED, Acts, grad, matrices, refused, step_is_refused
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer, SparseAdam

import collage_neuron
from collage_neuron import UnsupportedUpdate, exact_value
from collage_neuron.runtime.preconditions import check_gradient
from collage_neuron.states.store import read_fp32

pytestmark = pytest.mark.usefixtures("rejecting")


# --- what `step()` refuses: a sentence, and nothing is changed --------------------------------------------------------


def nothing(p: torch.Tensor) -> None:
    """Acts with this is an ordinary optimizer."""


def set_group(**entries: Any) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[1].update(entries)


def sparse_gradient(optimizer: Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][0]
    p.grad = torch.ones_like(p).to_sparse()


def half_parameter(optimizer: Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][0]
    p.grad = None
    p.data = p.data.half()
    p.grad = torch.ones_like(p)


def cut_state(optimizer: Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[1]["params"][0]]
    for name in [k for k in state if k == "exp_avg"] or ["param_lo"]:
        state[name].data = state[name].data[:2]


SECOND = r"a parameter \(number 0 with a gradient, shape \[8, 8\]\) of param_groups\[1\]"

NAN = float("nan")

AT_STEP: dict[str, tuple[Callable[[Optimizer], None], type[Exception], str]] = {
    "lr NaN": (set_group(lr=NAN), ValueError, r"param_groups\[1\]\['lr'\] is nan; nothing was updated: set a finite"),
    "lr Inf": (set_group(lr=float("inf")), ValueError, r"param_groups\[1\]\['lr'\] is inf; nothing was updated"),
    "lr tensor NaN": (set_group(lr=torch.tensor(NAN)), ValueError, r"param_groups\[1\]\['lr'\] is nan; nothing was"),
    "lr tensor Inf": (set_group(lr=torch.tensor(-torch.inf)), ValueError, r"param_groups\[1\]\['lr'\] is -inf"),
    "beta NaN": (set_group(betas=(0.9, NAN)), ValueError, r"is NaN \(a learning rate, beta or weight decay\); nothing"),
    "weight decay NaN": (set_group(weight_decay=NAN), ValueError, "weight decay.; nothing was updated"),
    "sparse": (sparse_gradient, UnsupportedUpdate, r"gradient of .*param_groups\[1\].* is sparse .*use sparse=False"),
    "half": (half_parameter, TypeError, rf"{SECOND} is torch.float16 \(float\).*only bfloat16 and float32 parameters"),
    "a state's shape": (cut_state, ValueError, r"a(nother shape than its| state 'exp_avg' of another)"),
    "strategy": (set_group(collage_strategy="minus"), ValueError, "unknown strategy 'minus'; choose one of"),
    "arithmetic": (set_group(collage_arithmetic="fp8"), ValueError, "unknown arithmetic 'fp8'; choose one of"),
    "backend": (
        set_group(collage_backend="tpu"),
        ValueError,
        "unknown backend 'tpu'; choose auto, reference, native, xla",
    ),
    "xla": (set_group(collage_backend="xla"), ValueError, "backend='xla' needs parameters on an XLA device"),
    "both": (
        set_group(collage_strategy="fp32", collage_arithmetic="bf16"),
        ValueError,
        "strategy 'fp32' stores .*use arithmetic='fp32' with it",
    ),
}


def two_groups(make: Callable[[Any], Optimizer], fresh: bool, strategy: str = "full") -> Optimizer:
    """A compiled optimizer of two groups with gradients, that has or has not taken steps."""
    params = matrices()
    optimizer = collage_neuron.compile(make([{"params": params[:1]}, {"params": params[1:]}]), strategy=strategy)
    for i in range(0 if fresh else 5):
        set_gradients(params, i)
        optimizer.step()
    set_gradients(params, 3)
    return optimizer


@pytest.mark.parametrize("fresh", [True, False], ids=["first step", "steady step"])
@pytest.mark.parametrize("name", AT_STEP)
def test_a_step_that_is_refused_for_its_second_group_changes_nothing(name: str, fresh: bool) -> None:
    change, error, message = AT_STEP[name]
    optimizer = two_groups(lambda groups: AdamW(groups, lr=0.1, weight_decay=0.1), fresh)
    change(optimizer)
    step_is_refused(optimizer, error, message)


ERRORS = UNSUPPORTED | {"an error of its own": (lambda p: 1 / 0, "division by zero")}


@pytest.mark.parametrize("name", ERRORS)
def test_a_step_whose_update_became_unsupported_changes_nothing(name: str) -> None:
    act, message = ERRORS[name]
    optimizer = two_groups(lambda groups: Acts(groups, nothing), fresh=False)
    optimizer.param_groups[1]["act"] = act
    step_is_refused(optimizer, UnsupportedUpdate if name in UNSUPPORTED else ZeroDivisionError, message)


@pytest.mark.parametrize("name", READING)
def test_a_step_that_looks_at_values_is_that_of_plain_torch(name: str) -> None:
    optimizer = two_groups(lambda groups: Acts(groups, nothing), fresh=False, strategy="fp32")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [nn.Parameter(exact_value(optimizer, p)) for p in params]
    oracle = Acts([{"params": plain[:1]}, {"params": plain[1:]}], nothing)
    for p, q in zip(params, plain, strict=True):
        oracle.state[q] = {"step": 2, "momentum": read_fp32(p, optimizer.state[p], "momentum")}
    for o in (optimizer, oracle):
        o.param_groups[1]["act"] = READING[name]
    for i in range(3):
        set_gradients(params, i)
        set_gradients(plain, i)
        optimizer.step()
        oracle.step()
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), q.detach(), rtol=2.0**-20, atol=2.0**-20)


def test_a_refused_step_can_be_taken_once_the_reason_is_gone() -> None:

    def make(groups: Any) -> Optimizer:
        return AdamW(groups, lr=0.1, weight_decay=0.1)

    optimizer, twin = two_groups(make, fresh=False), two_groups(make, fresh=False)
    optimizer.param_groups[1]["lr"] = NAN
    step_is_refused(optimizer, ValueError, "nothing was updated")
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    twin.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []


STRANGE_GRADIENTS = [
    (torch.ones(2, dtype=torch.float64), TypeError, "the gradient of here is torch.float64; only bfloat16 and float32"),
    (torch.ones(2, dtype=torch.complex64), TypeError, "the gradient of here is torch.complex64; only bfloat16 and flo"),
    (torch.ones(2, device="meta"), ValueError, "the gradient of here is on meta and the parameter on cpu"),
]


@pytest.mark.parametrize(("gradient", "error", "message"), STRANGE_GRADIENTS)
def test_a_gradient_of_another_kind_is_refused(gradient: torch.Tensor, error: type[Exception], message: str) -> None:
    p: Any = types.SimpleNamespace(grad=gradient, shape=gradient.shape, device=torch.device("cpu"))
    with pytest.raises(error, match=message):
        check_gradient(p, "here")


# --- updates and classes that cannot be rewritten: a sentence that points at the line ---------------------------------


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
