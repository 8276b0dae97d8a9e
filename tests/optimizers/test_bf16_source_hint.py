"""Compiled models that were bf16 already: a line in the log says what that costs if they were fp32 once."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp, train
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import checkpoint

Form = Callable[..., tuple[torch.nn.Module, Optimizer]]
HINT = "the parameters of this AdamW were bf16 already when it was compiled"


def both(model: torch.nn.Module, **settings: Any) -> tuple[torch.nn.Module, Optimizer]:
    return collage_neuron.compile(model, AdamW(model.parameters()), **settings)


def model_alone(model: torch.nn.Module, **settings: Any) -> tuple[torch.nn.Module, Optimizer]:
    model = collage_neuron.compile(model, **settings)
    return model, AdamW(model.parameters())


def optimizer_alone(model: torch.nn.Module, **settings: Any) -> tuple[torch.nn.Module, Optimizer]:
    return model, collage_neuron.compile(AdamW(model.parameters()), **settings)


def of_class(model: torch.nn.Module, **settings: Any) -> tuple[torch.nn.Module, Optimizer]:
    return model, collage_neuron.compile(AdamW, **settings)(model.parameters())


FORMS = pytest.mark.parametrize("form", [both, model_alone, optimizer_alone])


def hints(caplog: pytest.LogCaptureFixture) -> list[int]:
    """The levels of the hints that were logged."""
    return [record.levelno for record in caplog.records if HINT in record.getMessage()]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "collage_neuron")
    return caplog


@FORMS
@pytest.mark.parametrize("strategy", ["plus", "split312", "fp32", {"param": "bf16x2"}], ids=str)
def test_it_is_said_once_of_a_model_that_was_bf16(form: Form, strategy: Any, log: pytest.LogCaptureFixture) -> None:
    model, optimizer = form(mlp().bfloat16(), strategy=strategy)
    assert not log.records
    train(model, optimizer, range(3))
    assert hints(log) == [logging.INFO]
    collage_neuron.compile(optimizer, strategy=strategy)
    train(model, optimizer, range(2))
    assert hints(log) == [logging.INFO]


@FORMS
def test_nothing_is_said_where_fp32_values_were_kept(form: Form, log: pytest.LogCaptureFixture) -> None:
    train(*form(mlp()), range(2))
    assert hints(log) == []


@FORMS
@pytest.mark.parametrize("settings", [{"strategy": "bf16"}, {"strategy": "stochastic"}, {"verbose": False}], ids=str)
def test_nothing_is_said_of_one_word_nor_where_it_is_silenced(
    form: Form, settings: dict[str, Any], log: pytest.LogCaptureFixture
) -> None:
    train(*form(mlp().bfloat16(), **settings), range(2))
    assert hints(log) == []


def test_nothing_is_said_of_a_class_whose_model_has_to_be_bf16(log: pytest.LogCaptureFixture) -> None:
    train(*of_class(mlp().bfloat16()), range(2))
    assert hints(log) == []


def test_nothing_is_said_in_other_processes(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("RANK", "1")
    train(*both(mlp().bfloat16()), range(2))
    assert hints(log) == []


@pytest.mark.parametrize("how", ["compiled run", "fp32 run"])
def test_nothing_is_said_if_a_checkpoint_brings_low_words(how: str, log: pytest.LogCaptureFixture) -> None:
    model, optimizer = both(mlp().bfloat16())
    if how == "compiled run":
        of_before, before = both(mlp())
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


def test_nothing_is_said_if_a_part_of_the_model_was_fp32(log: pytest.LogCaptureFixture) -> None:
    model = mlp()
    model[0].bfloat16()
    train(*both(model), range(2))
    assert hints(log) == []
