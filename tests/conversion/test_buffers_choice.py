"""Which buffers become bf16, and what is said of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from buffer_models import Rotary, Sinusoidal, compiled, dtypes, sinusoidal, tokens
from models import equal_states, mlp, train
from torch import nn
from torch.optim import SGD, AdamW

import collage_neuron
from collage_neuron import RoundedBuffers


def test_buffers_may_all_stay_or_all_be_cast() -> None:
    model: nn.Module = sinusoidal()
    compiled(model, buffers="keep")
    assert dtypes(model) == {"1.table": torch.float32}
    with pytest.raises(RuntimeError, match="dtype"):
        model(tokens())
    model = nn.Sequential(sinusoidal(), Rotary(16, "inv_freq"), nn.BatchNorm1d(3))
    compiled(model, buffers="cast")
    assert {t.dtype for t in model.buffers() if t.is_floating_point()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("form", ["pair", "model"])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"buffers": "all"}, ValueError, "unknown buffers 'all'; choose one of auto, keep, cast"),
        ({}, RoundedBuffers, "Pass buffers='keep' to leave every buffer in fp32"),
    ],
)
def test_an_unknown_choice_and_a_warning_made_an_error_change_nothing(
    settings: dict[str, Any], error: Any, message: str, form: str
) -> None:
    model = sinusoidal()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        compiled(model, form, **settings)
    assert equal_states(model.state_dict(), before)


@pytest.mark.parametrize("target", [AdamW, SGD(mlp().parameters())])
def test_the_choice_needs_a_model(target: Any) -> None:
    with pytest.raises(ValueError, match="buffers='keep' needs the model, and without it no buffer is changed"):
        collage_neuron.compile(target, buffers="keep")


def test_one_warning_names_all_and_points_at_the_caller() -> None:
    model = nn.Sequential(*(Sinusoidal() for _ in range(3)), nn.Linear(16, 1))
    model.register_buffer("bias", torch.tensor([torch.finfo(torch.float32).min, 0]))
    with pytest.warns(RoundedBuffers) as seen:
        collage_neuron.compile(model)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert r"bias (-3.4e+38 becomes infinite); *.table (3 of them, each off by" in str(seen[0].message)


def test_values_that_bf16_holds_and_other_dtypes_change_without_a_word() -> None:
    model = mlp()
    given = {
        "mask": torch.tensor([0.0, 1.0, float("-inf"), float("nan"), 255.0]),
        "count": torch.tensor(2**40),
        "seen": torch.tensor([True]),
        "turned": torch.polar(torch.ones(3), torch.arange(3.0)),
        "wide": torch.tensor([0.1], dtype=torch.float64),
    }
    for name, t in given.items():
        model.register_buffer(name, t.clone())
    model, optimizer = compiled(model)
    train(model, optimizer, [0])
    found = dict(model.named_buffers())
    assert found.pop("mask").dtype == torch.bfloat16
    assert all(torch.equal(t, given[name]) and t.dtype == given[name].dtype for name, t in found.items())


def test_a_buffer_of_two_modules_stays_one() -> None:
    rotary: Any = Rotary(8, "inv_freq")
    model: Any = nn.ModuleList([rotary, nn.Linear(2, 2), Rotary(8, "inv_freq")])
    model[1].register_buffer("table", rotary.inv_freq)
    compiled(model)
    assert model[1].table is rotary.inv_freq
    assert rotary.inv_freq.dtype == torch.float32
