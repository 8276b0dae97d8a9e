"""Gradients that are accumulated over microsteps: what they lose (docs/integrations.md), and sums in fp32."""

from __future__ import annotations

import copy
from functools import reduce
from pathlib import Path

import accumulated_runs
import pytest
import torch
from sharded_runs import different
from torch import nn
from worlds import run_world

import collage_neuron

Gradients = list[torch.Tensor]


def microsteps(n: int) -> tuple[Gradients, Gradients, Gradients]:
    """Gradients of n microsteps added by autograd in bf16, in fp32, and in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    target = torch.randn(64, 64) / 8
    params = list(model.parameters())
    in_bf16 = [torch.zeros_like(p) for p in params]
    total = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for x in torch.randn(n, 32, 64).bfloat16():
        model.zero_grad()
        ((model(x).float() - x.float() @ target).square().mean() / n).backward()
        for p, *sums in zip(params, in_bf16, total, exact, strict=True):
            assert p.grad is not None
            for s in sums:
                s += p.grad  # as autograd does with `p.grad`, in the dtype of the sum
    return in_bf16, total, exact


def relative(found: Gradients, exact: Gradients) -> float:
    """The norm of the error in all gradients, over that of the gradients."""
    error = sum((f.double() - e).square().sum() for f, e in zip(found, exact, strict=True))
    return float((error / sum(e.square().sum() for e in exact)) ** 0.5)


@pytest.mark.parametrize(("n", "percent"), [(8, 0.33), (64, 0.8), (256, 1.6)])
def test_what_accumulation_in_bf16_loses_and_one_rounding_of_a_sum_in_fp32(n: int, percent: float) -> None:
    in_bf16, total, exact = microsteps(n)
    assert 100 * relative(in_bf16, exact) == pytest.approx(percent, rel=0.25)
    assert 100 * relative([t.bfloat16() for t in total], exact) == pytest.approx(0.17, rel=0.25)
    assert 100 * relative(total, exact) < 2e-5


# --- accumulate_in_fp32 -----------------------------------------------------------------------------------------------


def summed(p: nn.Parameter, gradients: torch.Tensor) -> torch.Tensor:
    """`p.grad` after a backward pass for each row of `gradients`."""
    for g in gradients:
        (p * g).sum().backward()
    assert p.grad is not None
    return p.grad


class One(nn.Module):
    """A model of one parameter."""

    def __init__(self, n: int, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, n, dtype=torch.bfloat16, device=device))


def test_gradients_are_summed_in_fp32_in_place_until_the_hooks_are_removed() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(256, 1000).bfloat16() * torch.logspace(-3, 3, 1000).bfloat16()
    model = One(1000)
    sums = collage_neuron.accumulate_in_fp32(model)
    found = summed(model.weight, gradients)
    assert found.dtype == torch.float32
    assert torch.equal(found, reduce(torch.add, gradients.float()))  # one after another, in fp32
    wide = gradients.double()
    assert ((found - wide.sum(0)).abs() <= 255 * 2**-24 * wide.abs().sum(0)).all()  # n - 1 additions
    memory = found.data_ptr()
    model.zero_grad(set_to_none=False)
    assert summed(model.weight, gradients[:2]).data_ptr() == memory
    model.zero_grad()
    sums.remove()
    assert summed(model.weight, gradients[:2]).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_step_reads_the_sum_in_fp32(backend: str) -> None:
    """What bf16 would drop from the gradient, 2**-8 of it, is in the parameter's low word after the step."""
    if backend == "xla":
        pytest.importorskip("torch_xla")
    model = One(1, "xla" if backend == "xla" else "cpu")
    _, optimizer = collage_neuron.compile(model, torch.optim.SGD(model.parameters(), lr=1.0), backend=backend)
    collage_neuron.accumulate_in_fp32(model)
    ones = torch.ones(1, 1, dtype=torch.bfloat16, device=model.weight.device)
    summed(model.weight, torch.cat([ones, ones * 2**-9, ones * 2**-9]))
    optimizer.step()
    assert collage_neuron.exact_value(optimizer, model.weight).item() == -1.0 - 1.0 - 2**-8


def test_clipping_scaling_and_bytes_see_the_sum() -> None:
    model = One(2)
    _, optimizer = collage_neuron.compile(model, torch.optim.SGD(model.parameters(), lr=2.0), strategy="fp32")
    collage_neuron.accumulate_in_fp32(model)
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=4.0)
    before = collage_neuron.exact_value(optimizer, model.weight)
    for worth in (1.0, 2**-9):
        scaler.scale((model.weight * worth).sum()).backward()
    scaler.unscale_(optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [1 + 2**-9] * 2
    assert collage_neuron.bytes_per_parameter(optimizer) == 2 + 4 + 4
    nn.utils.clip_grad_norm_(model.parameters(), (1 + 2**-9) * 2**-0.5)
    clipped = model.weight.grad.clone()
    scaler.step(optimizer)
    assert torch.equal(collage_neuron.exact_value(optimizer, model.weight), before - 2 * clipped)


@pytest.mark.parametrize("alone", [False, True])
def test_it_may_be_called_before_the_line(alone: bool) -> None:
    model = nn.Linear(2, 2)
    collage_neuron.accumulate_in_fp32(model)
    optimizer = torch.optim.SGD(model.parameters())
    _ = collage_neuron.compile(model) if alone else collage_neuron.compile(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 2).bfloat16()).sum().backward()
    assert [p.grad is not None and p.grad.dtype for p in model.parameters()] == [torch.float32] * 2


def test_frozen_and_fp32_parameters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    model[1].bias.requires_grad_(False)
    collage_neuron.accumulate_in_fp32(model)
    model[1](model[0](torch.ones(2)).bfloat16()).sum().backward()
    assert {n: p.grad is not None and p.grad.dtype for n, p in model.named_parameters()} == {
        "0.weight": torch.float32, "0.bias": torch.float32, "1.weight": torch.float32, "1.bias": False
    }  # fmt: skip


def test_under_ddp_each_process_rounds_its_sum_once_and_sharded_models_are_rejected(tmp_path: Path) -> None:
    for by_hand, found, said in run_world(2, tmp_path, accumulated_runs.under_ddp):
        for name, whole in found.items():
            assert (name, different(whole, by_hand)) == (name, [])
        assert all(f"DistributedDataParallel({name}=True)" in said[name] for name in accumulated_runs.REJECTED)
        assert "DistributedDataParallel(static_graph=True)" in said["late"]  # by the first backward pass
        assert "MixedPrecisionPolicy(reduce_dtype=torch.float32)" in said["sharded"]


class Clips(torch.optim.AdamW):
    """Writes to the gradients in its step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # returns nothing
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


def test_a_step_may_write_to_sums_in_fp32() -> None:
    """They stay fp32, so it runs as written: a compiled update would store them in bf16."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    plain = copy.deepcopy(model)
    model, optimizer = collage_neuron.compile(model, Clips(model.parameters()), strategy="fp32", verbose=False)
    other = Clips(plain.parameters())
    collage_neuron.accumulate_in_fp32(model)
    for _ in range(3):
        sums = [summed(p, torch.randn(3, *p.shape).bfloat16()).detach().clone() for p in model.parameters()]
        for q, x in zip(plain.parameters(), sums, strict=True):
            q.grad = x
        optimizer.step()
        other.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(collage_neuron.exact_value(optimizer, p), q)
            assert p.grad is not None
            assert p.grad.tolist() == getattr(q.grad, "tolist", list)()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_penalty_on_sums_in_fp32_has_a_gradient() -> None:
    """`create_graph=True`: the gradient of (2 w)**2 / 2 is 4 w."""
    model = nn.Linear(8, 1, bias=False).bfloat16()
    collage_neuron.accumulate_in_fp32(model)
    model.weight.square().sum().backward(create_graph=True)
    assert model.weight.grad is not None
    (penalty,) = torch.autograd.grad(model.weight.grad.square().sum() / 2, model.weight)
    assert torch.equal(penalty, 4 * model.weight)
