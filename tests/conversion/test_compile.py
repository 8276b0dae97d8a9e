"""The four call forms of `compile`, and what they promise about the objects they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compile_forms import FORMS, adamw, states
from models import bits, mlp, parameters, set_gradients, train
from torch import nn
from torch.optim import SGD, AdamW

import collage_neuron

PAIRS = ("light", "plus", "full")

"""Strategies that keep a parameter as hi + lo."""


def test_the_objects_that_come_back_are_those_that_were_given() -> None:
    model = mlp()
    optimizer, params = adamw(model), list(model.parameters())
    assert collage_neuron.compile(model, optimizer) == (model, optimizer)
    assert collage_neuron.compile(optimizer) is optimizer
    assert collage_neuron.compile(model) is model
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))


def test_a_class_gives_a_subclass_and_the_same_one_every_time() -> None:
    compiled = collage_neuron.compile(AdamW, strategy="full")
    assert issubclass(compiled, AdamW)
    assert compiled is collage_neuron.compile(AdamW, strategy="full")
    assert compiled is not collage_neuron.compile(AdamW, strategy="light")
    assert collage_neuron.compile(AdamW) is collage_neuron.compile(collage_neuron.compile(AdamW))


def test_fp32_parameters_in_a_compiled_class_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"float32 parameters.*save no memory.*model.to\(torch.bfloat16\)"):
        collage_neuron.compile(AdamW)(mlp().parameters())


def split_parameters(form: str, strategy: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """(fp32 original, parameter, state) after a step that changes no parameter: `compile(model)` splits at a step."""
    model = nn.Linear(64, 64)
    originals = [p.detach().clone() for p in model.parameters()]
    optimizer = FORMS[form](model, strategy=strategy)
    optimizer.param_groups[0]["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    yield from ((x, p.detach(), optimizer.state[p]) for x, p in zip(originals, model.parameters(), strict=True))


@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_hi_plus_lo_is_the_fp32_parameter(form: str, strategy: str) -> None:
    """x - hi is at most 2**-8 of x's binade, half an ulp of hi; lo loses at most half an ulp, 2**-9 of that."""
    for original, p, state in split_parameters(form, strategy):
        x, hi, lo = original.double(), p.double(), state["param_lo"].double()
        assert ((hi + lo - x).abs() <= 2**-17 * x.abs()).all()
        assert ((hi - x).abs() > 2**-17 * x.abs()).any()  # the low words do say something
        assert torch.equal((p.float() + state["param_lo"].float()).bfloat16(), p)


def test_a_value_whose_split_ends_in_a_tie_is_split_the_canonical_way() -> None:
    """1 + 3 * 2**-8 - 2**-20: hi = 1 + 2**-7, and the rest rounds to half an ulp of hi, a tie that goes to even."""
    p = nn.Parameter(torch.tensor([1 + 3 * 2**-8 - 2**-20]))
    optimizer = collage_neuron.compile(SGD([p]), strategy="plus")
    lo = optimizer.state[p]["param_lo"]
    assert (p.item(), lo.item()) == (1 + 2**-6, -(2**-8))


@pytest.mark.parametrize("form", FORMS)
def test_the_fp32_strategy_keeps_the_fp32_parameter_itself(form: str) -> None:
    for original, p, state in split_parameters(form, "fp32"):
        assert torch.equal(bits(state["param_master"]), bits(original))
        assert torch.equal(p, original.bfloat16())


@pytest.mark.parametrize("strategy", ["bf16", "fp32_states"])
@pytest.mark.parametrize("form", FORMS)
def test_the_strategies_without_a_second_word_round_to_nearest(form: str, strategy: str) -> None:
    for original, p, state in split_parameters(form, strategy):
        assert torch.equal(p, original.bfloat16())
        assert not [key for key in state if key.startswith("param")]


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_all_that_is_fp32_in_the_model_becomes_bf16_and_nothing_else(form: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "mask": nn.Embedding(2, 2)})
    model["mask"].weight = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
    if form == "(model)":
        collage_neuron.compile(model, buffers="cast")
    else:
        collage_neuron.compile(model, SGD(model["a"].parameters()), buffers="cast")
    assert {t.dtype for t in (*model["a"].parameters(), *model["norm"].parameters())} == {torch.bfloat16}
    assert model["norm"].running_mean.dtype == torch.bfloat16
    assert (model["norm"].num_batches_tracked.dtype, model["mask"].weight.dtype) == (torch.int64, torch.int64)


def test_gradients_that_are_there_are_kept() -> None:
    params = parameters()
    set_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    collage_neuron.compile(SGD(params))
    assert all(torch.equal(p.grad.float(), g) for p, g in zip(params, before, strict=True) if p.grad is not None)
    assert {p.grad.dtype for p in params if p.grad is not None} == {torch.bfloat16}


def two_groups(model: nn.Sequential, **own: Any) -> AdamW:
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **own}]
    return AdamW(groups, lr=1e-2)


ADAM = {"step", "exp_avg", "exp_avg_sq"}


def test_groups_may_have_strategies_of_their_own() -> None:
    model = mlp()
    optimizer = two_groups(model, collage_strategy="fp32")
    model, optimizer = collage_neuron.compile(model, optimizer, strategy="full")
    train(model, optimizer, range(2))
    assert states(optimizer) == [ADAM | {"param_lo", "exp_avg_lo", "exp_avg_sq_lo"}, ADAM | {"param_master"}]


def test_the_default_is_split433_and_in_the_papers_arithmetic_plus() -> None:
    """In every form; also in groups, and in classes that are given the arithmetic alone."""

    def strategies(optimizer: Any) -> list[str]:
        return [group["collage_strategy"] for group in optimizer.param_groups]

    def param() -> nn.Parameter:
        return nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    paper: dict[str, Any] = {"collage_arithmetic": "bf16"}
    optimizer = collage_neuron.compile(SGD([{"params": [param()]}, {"params": [param()], **paper}]))
    optimizer.add_param_group({"params": [param()], **paper})
    assert strategies(optimizer) == ["split433", "plus", "plus"]
    assert strategies(collage_neuron.compile(SGD([param()]), arithmetic="bf16")) == ["plus"]
    assert strategies(collage_neuron.compile(SGD, arithmetic="bf16")([param()])) == ["plus"]
    assert strategies(collage_neuron.compile(SGD)([param()])) == ["split433"]
    assert strategies(collage_neuron.compile(SGD)([param()], **paper)) == ["plus"]
    with pytest.raises(ValueError, match=r"'split433' stores bf16\+int.*use arithmetic='fp32'.*\(strategy='plus'\)"):
        collage_neuron.compile(SGD([param()]), strategy="split433", arithmetic="bf16")
