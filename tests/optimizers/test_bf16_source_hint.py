"""Compiled models that were bf16 already: a line in the log says what that costs if they were fp32 once."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from compile_forms import FORMS
from models import mlp, train
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import checkpoint

HINT = "the parameters of this AdamW were bf16 already when it was compiled"


def made(
    model: torch.nn.Module, form: str = "(model, optimizer)", **settings: Any
) -> tuple[torch.nn.Module, Optimizer]:
    return model, FORMS[form](model, **settings)


IN_EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def hints(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The levels of the hints that were logged."""
    return [record.levelno for record in caplog.records if HINT in record.getMessage()]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "collage_neuron")
    return caplog


@IN_EVERY_FORM
@pytest.mark.parametrize("strategy", ["plus", "split312", "fp32", {"param": "bf16x2"}], ids=str)
def test_it_is_said_once_of_a_model_that_was_bf16(form: str, strategy: Any, log: pytest.LogCaptureFixture) -> None:
    model, optimizer = made(mlp().bfloat16(), form, strategy=strategy)
    assert not log.records
    train(model, optimizer, range(3))
    assert hints(log) == [logging.INFO]
    collage_neuron.compile(optimizer, strategy=strategy)
    train(model, optimizer, range(2))
    assert hints(log) == [logging.INFO]


@IN_EVERY_FORM
def test_nothing_is_said_where_fp32_values_were_kept(form: str, log: pytest.LogCaptureFixture) -> None:
    train(*made(mlp(), form), range(2))
    assert hints(log) == []


def test_nothing_is_said_of_a_class_whose_model_has_to_be_bf16(log: pytest.LogCaptureFixture) -> None:
    model = mlp().bfloat16()
    train(model, collage_neuron.compile(AdamW)(model.parameters()), range(2))
    assert hints(log) == []


def test_nothing_is_said_in_other_processes(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    train(*made(mlp().bfloat16()), range(2))
    assert hints(log) == []


@pytest.mark.parametrize("how", ["compiled run", "fp32 run"])
def test_nothing_is_said_if_a_checkpoint_brings_low_words(how: str, log: pytest.LogCaptureFixture) -> None:
    model, optimizer = made(mlp().bfloat16())
    if how == "compiled run":
        of_before, before = made(mlp())
        train(of_before, before, range(2))
        log.clear()
        model.load_state_dict(copy.deepcopy(of_before.state_dict()))
        optimizer.load_state_dict(before.state_dict())
    else:
        plain = mlp(1)
        train(plain, (plains := AdamW(plain.parameters())), range(2))
        weights, states = plain.state_dict(), plains.state_dict()
        checkpoint.set_fp32_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    train(model, optimizer, range(2))
    assert hints(log) == []
