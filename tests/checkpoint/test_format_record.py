"""The format of each state is recorded and saved with it; keys and dtypes alone do not tell formats apart."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import initial, stepped
from integer_words import BF16_INT8
from models import differences, snapshot
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import SmallSteps
from collage_neuron.numerics.eft import Value, widen
from collage_neuron.numerics.formats import FORMATS, FORMATS_KEPT
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.states import format_record
from collage_neuron.states.store import kept_format, read_exact, record_of

NAME = BF16_INT8.name


def _coarse(x: Value) -> Sequence[Value]:
    return BF16_INT8.encode(widen(BF16_INT8.encode(x)[0]))


COARSE = replace(BF16_INT8, name="coarse", encode=_coarse, decode=lambda words: widen(words[0]))
"""Words of the same names and types that mean something else: here the second one nothing at all."""

# True of `coarse`: weights of 1 are rounded by 2**-8, of which a learning rate of .01 is 2.6 (told by a test below).
pytestmark = pytest.mark.filterwarnings("ignore:.* keeps parameters as coarse, :collage_neuron.SmallSteps")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, BF16_INT8)
    monkeypatch.setitem(FORMATS, COARSE.name, COARSE)


def start(strategy: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[Optimizer, nn.Parameter]:
    p = nn.Parameter(initial().to(dtype))
    return collage_neuron.compile(AdamW([p], lr=1e-2), strategy=strategy), p


def recorded(optimizer: Optimizer) -> Any:
    """What a checkpoint has."""
    text = optimizer.state_dict()["param_groups"][0].get(FORMATS_KEPT)
    return None if text is None else json.loads(text)


ALL = {"param": NAME, "exp_avg": NAME, "exp_avg_sq": NAME}


def test_what_keys_would_tell_wrong_is_saved() -> None:
    optimizer, p = start({"*": NAME})
    assert recorded(optimizer) is None  # nothing is stored yet
    assert recorded(stepped(optimizer)) == ALL
    assert record_of(optimizer, p) == ALL
    optimizer, _ = start({"*": "bf16", "exp_avg": NAME})
    assert recorded(stepped(optimizer)) == {"exp_avg": NAME}
    optimizer, _ = start("split311")
    assert recorded(stepped(optimizer)).keys() == {"param"}  # of states in codes it has the values


@pytest.mark.filterwarnings("ignore:a parameter group with float32 parameters")
def test_parameters_of_a_group_may_differ() -> None:
    p, q = nn.Parameter(initial()), nn.Parameter(initial().float())
    optimizer = collage_neuron.compile(SGD([p], lr=1e-2, momentum=0.9), strategy={"*": NAME})
    optimizer.add_param_group({"params": [nn.Parameter(initial()), q]})
    stepped(optimizer)
    found = [json.loads(group[FORMATS_KEPT]) for group in optimizer.state_dict()["param_groups"]]
    assert found[0] == {"param": NAME, "momentum_buffer": NAME}
    assert found[1] == {"param": [NAME, None], "momentum_buffer": [NAME, None]}
    other = copy.deepcopy(optimizer)
    format_record.load(other)
    third, fourth = other.param_groups[1]["params"]
    assert record_of(other, third)["momentum_buffer"] == NAME
    assert "momentum_buffer" not in record_of(other, fourth)


def test_what_the_second_word_is_worth_is_measured_not_told_by_its_type() -> None:
    start({"*": NAME})
    with pytest.warns(SmallSteps, match=r"keeps parameters as coarse, which rounds weights .* is lost"):
        start({"*": COARSE.name})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_has_the_record(copied: Any) -> None:
    optimizer, p = start({"*": COARSE.name})
    other, q = copied((stepped(optimizer), p))
    assert kept_format(q, other.state[q], "exp_avg", record_of(other, q)) is COARSE


def test_a_checkpoint_brings_the_record() -> None:
    """Its words have the keys and the types of another format too, which would read them otherwise."""
    optimizer, _ = start({"*": COARSE.name})
    saved = copy.deepcopy(stepped(optimizer).state_dict())
    saved["state"][0]["exp_avg_lo"].fill_(100)
    other, q = start({"*": COARSE.name})
    other.load_state_dict(saved)
    assert record_of(other, q) == dict.fromkeys(ALL, COARSE.name)
    value = read_exact(q, other.state[q], "exp_avg", record_of(other, q))
    assert torch.equal(value, other.state[q]["exp_avg"].float())
    assert not torch.equal(value, BF16_INT8.decode([other.state[q]["exp_avg"], other.state[q]["exp_avg_lo"]]))


def test_an_optimizer_that_was_put_together_by_hand_finds_the_record() -> None:
    optimizer, p = start({"*": COARSE.name})
    stepped(optimizer).state_dict()
    other = collage_neuron.compile(AdamW([p], lr=1e-2), strategy={"*": COARSE.name})
    other.state, other.param_groups = optimizer.state, optimizer.param_groups
    format_record.put_back(other, {})
    assert kept_format(p, other.state[p], "exp_avg", record_of(other, p)) is COARSE


@pytest.mark.filterwarnings("ignore::collage_neuron.StrategyChanged")
def test_words_move_between_formats_of_the_same_keys_and_types() -> None:
    optimizer, p = start({"*": NAME})
    stepped(optimizer)
    assert optimizer.state[p]["exp_avg_lo"].any()
    collage_neuron.compile(optimizer, strategy={"*": COARSE.name})
    assert not optimizer.state[p]["exp_avg_lo"].any()
    assert record_of(optimizer, p) == dict.fromkeys(ALL, COARSE.name)


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_of_before_the_record_is_understood(strategy: str) -> None:
    """By its keys, and where these are those of a pair of bf16 words, by the types of its words."""
    optimizer, p = start(strategy)
    saved = copy.deepcopy(stepped(optimizer).state_dict())
    saved["param_groups"][0].pop(FORMATS_KEPT, None)
    other, q = start(strategy)
    with torch.no_grad():
        q.copy_(p)
    other.load_state_dict(saved)
    assert recorded(stepped(other)) == recorded(stepped(optimizer))
    assert (recorded(other) is None) is (not strategy.startswith("split"))
    assert differences(snapshot(other), snapshot(optimizer)) == []


def test_a_format_that_is_not_known_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = start({"*": COARSE.name})
    saved = copy.deepcopy(stepped(optimizer).state_dict())
    other, q = start("plus")
    saved["param_groups"][0]["collage_strategy"] = "plus"
    before = dict(record_of(other, q))
    monkeypatch.delitem(FORMATS, COARSE.name)
    with pytest.raises(ValueError, match=r"\[0\] has states that were stored as 'coarse', a format that is not known"):
        other.load_state_dict(saved)
    assert record_of(other, q) == before


@pytest.mark.parametrize("way", ["state dict", "pickle"])
def test_states_of_a_strategy_whose_formats_were_others_are_converted(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier version: its codes have the same keys and dtypes, and other meanings."""
    new = STRATEGIES["split422"]
    monkeypatch.setitem(STRATEGIES, "split422", replace(new, state="i16q4", slow="u16q8"))
    old, p = start("split422")
    stepped(old)
    saved = pickle.dumps(old.state_dict() if way == "state dict" else old)
    names = ("exp_avg", "exp_avg_sq")
    before = [read_exact(p, old.state[p], name, record_of(old, p)) for name in names]
    monkeypatch.setitem(STRATEGIES, "split422", new)
    optimizer, q = start("split422")
    if way == "pickle":
        optimizer = pickle.loads(saved)
        q = optimizer.param_groups[0]["params"][0]
    else:
        optimizer.load_state_dict(pickle.loads(saved))
    record = record_of(optimizer, q)
    for name, value in zip(names, before, strict=True):
        error = FORMATS[record[name]].error
        assert error is not None
        assert ((read_exact(q, optimizer.state[q], name, record) - value).abs() <= 1.01 * error(value.abs())).all()
    stepped(optimizer)
    assert set(record_of(optimizer, q).values()) == {"bf16+int16", "i16q8", "u16q16"}
