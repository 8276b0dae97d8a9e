"""Checkpoints of an optimizer that steps another one: ours, plain torch's, in fp32; what is no checkpoint of it."""

from __future__ import annotations

import copy
from typing import Any

import cases_of_inner as cases
import pytest
import torch
from cases_of_inner import CASES, adam, compiled, error, plain, run
from models import through_torch_save
from torch.nn import Parameter

import collage_neuron
from collage_neuron import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")


def saved(optimizer: Any, params: list[Parameter]) -> Any:
    return through_torch_save((optimizer.state_dict(), [p.detach() for p in params]))


def load(optimizer: Any, params: list[Parameter], found: Any) -> None:
    with torch.no_grad():
        for p, x in zip(params, found[1], strict=True):
            p.copy_(x)
    optimizer.load_state_dict(found[0])


NOT_SAVED = {"listed", "anchored", "holding", "asks for types"}
"""Plain torch saves none of the inner states of these."""


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(name: str, strategy: str) -> None:
    optimizer, params = compiled(CASES[name], strategy)
    run(name, optimizer, params, 4)
    found = saved(optimizer, params)
    run(name, optimizer, params, 4, 4)
    resumed, others = compiled(CASES[name], strategy)
    load(resumed, others, found)
    run(name, resumed, others, 4, 4)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for key, x in optimizer.state[p].items():
            assert torch.equal(x, resumed.state[q][key]) if isinstance(x, torch.Tensor) else x == resumed.state[q][key]


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_SAVED])
def test_checkpoints_of_plain_torch_load_and_ours_load_in_plain_torch(name: str) -> None:
    optimizer, params = compiled(CASES[name])
    other, exact = plain(CASES[name])
    run(name, other, exact, 4)
    optimizer.load_state_dict(other.state_dict())  # which has the tensors of the other one
    for p, x in zip(params, exact, strict=True):
        collage_neuron.set_exact_value(optimizer, p, x.detach())
    back, again = plain(CASES[name])
    load(back, again, (optimizer.state_dict(), exact))  # copies
    for o, ps in ((other, exact), (optimizer, params), (back, again)):
        run(name, o, ps, 4, 4)
    assert error(optimizer, params, exact) < 1e-5
    assert all((p - q).abs().max() < 1e-5 for p, q in zip(exact, again, strict=True))


def test_a_checkpoint_of_another_model_or_strategy_is_rejected_and_nothing_changed() -> None:
    optimizer, params = compiled(CASES["lookahead"], "split433")
    run("lookahead", optimizer, params, 2)
    before = copy.deepcopy(dict(optimizer.state))
    found = optimizer.state_dict()
    fewer = {**found, "collage_neuron": found["collage_neuron"][:1]}
    with pytest.raises(ValueError, match="it has 1 parameters, and the optimizer 3"):
        optimizer.load_state_dict(fewer)
    turned = {**found, "collage_neuron": found["collage_neuron"][::-1]}
    with pytest.raises(ValueError, match=r"its parameter 0 is kept as .*: compile as the run did that has saved it"):
        optimizer.load_state_dict(turned)
    with pytest.raises(KeyError, match="lookahead_state"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    for p, state in before.items():
        own = next(optimizer.state[q] for q in params if q.shape == p.shape)
        assert all(torch.equal(x, own[k]) for k, x in state.items())


def test_a_checkpoint_that_has_lost_our_part_is_rejected() -> None:
    optimizer, params = compiled(CASES["ortho"], "plus")
    run("", optimizer, params, 2)
    found = optimizer.state_dict()
    assert found.pop("collage_neuron")
    with pytest.raises(ValueError, match=r"it is of a compiled run, and its 'collage_neuron', .* is missing"):
        optimizer.load_state_dict(found)


@pytest.mark.parametrize("name", ["lookahead", "ortho"])
def test_the_state_in_fp32_is_that_of_plain_torch(name: str) -> None:
    optimizer, params = compiled(CASES[name])
    model = torch.nn.ParameterList(params)
    run("", optimizer, params, 3)
    weights, state = checkpoint.get_fp32_state_dict(model, optimizer)
    assert "collage" not in str(state)
    other, exact = plain(CASES[name])
    load(other, exact, (copy.deepcopy(state), weights.values()))  # torch keeps tensors that it is given
    for o, ps in ((optimizer, params), (other, exact)):
        run("", o, ps, 3, 3)
    assert error(optimizer, params, exact) < 1e-5
    again, others = compiled(CASES[name])
    model = torch.nn.ParameterList(others)
    checkpoint.set_fp32_state_dict(model, again, model_state_dict=weights, optim_state_dict=state)
    run("", again, others, 3, 3)
    assert error(again, others, exact) < 1e-5
    with pytest.raises(ValueError, match="has low words of its own: load it with"):
        checkpoint.set_fp32_state_dict(model, again, model_state_dict=weights, optim_state_dict=optimizer.state_dict())


def test_safetensors_has_no_place_for_it() -> None:
    optimizer, _ = compiled(CASES["ortho"])
    with pytest.raises(ValueError, match="of an optimizer that steps another one, and safetensors has no place"):
        checkpoint.to_tensors(optimizer.state_dict())


def test_a_state_dict_that_is_no_dictionary_is_rejected() -> None:
    class Odd(cases.Listed):
        def state_dict(self) -> Any:
            return [super().state_dict()]

    optimizer, _ = compiled(lambda ps: Odd(adam(ps)))
    with pytest.raises(TypeError, match=r"Odd.state_dict\(\) returns a list; return a dictionary"):
        optimizer.state_dict()
