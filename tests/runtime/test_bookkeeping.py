"""Copies, pickles and checkpoints in the middle of a run: nothing that an optimizer remembers is lost on the way."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest
import torch
from models import REPRESENTATIVE, backward, differences, first, mlp, snapshot, through_torch_save, train
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

import collage_neuron
from collage_neuron import exact_value, skipped_steps
from collage_neuron.states import external_writes

HOOKS_OF_ALL = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)

Run = tuple[nn.Module, Optimizer]


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def new_run(strategy: str, seed: int = 0) -> Run:
    model = mlp(seed)
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return collage_neuron.compile(model, optimizer, strategy=strategy, nonfinite="skip", seed=7 + seed)


def through_state_dict(run: Run) -> Run:
    is_bf16 = run[1].param_groups[0]["collage_strategy"] == "bf16"
    model, optimizer = new_run("light" if is_bf16 else "bf16", seed=1)
    with pytest.warns(UserWarning, match="goes on with those of the checkpoint"):
        optimizer.load_state_dict(through_torch_save(run[1].state_dict()))
    model.load_state_dict(run[0].state_dict())
    return model, optimizer


COPIES = {f.__name__: f for f in (copy.deepcopy, through_pickle, through_torch_save, through_state_dict)}


def skip(run: Run, seed: int) -> None:
    model, optimizer = run
    optimizer.zero_grad()
    backward(model, seed)
    gradient = first(model).grad
    assert gradient is not None
    gradient[0, 0] = float("nan")
    optimizer.step()


def in_the_middle(strategy: str) -> Run:
    run = new_run(strategy)
    train(*run, range(2))
    skip(run, 2)
    train(*run, [3])
    skip(run, 4)
    return run


def go_on(run: Run) -> tuple[dict[str, Any], int, str]:
    """A step, a skipped step and another step; what is left, told in full."""
    run[1].zero_grad()
    train(*run, [5])
    skip(run, 6)
    train(*run, [7])
    return snapshot(run[1]), skipped_steps(run[1]), collage_neuron.explain(run[1], graphs=True)


@pytest.mark.parametrize("strategy", REPRESENTATIVE)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_in_the_middle_of_a_run_goes_on_as_the_original(way: str, strategy: str) -> None:
    """Low words, random bits and skipped steps included."""
    run = in_the_middle(strategy)
    other = COPIES[way](run)
    assert skipped_steps(other[1]) == 2
    found, whole = go_on(other), go_on(run)
    assert differences(found[0], whole[0]) == []
    assert found[1:] == whole[1:]
    assert whole[1] == 3


@pytest.mark.parametrize("strategy", ["plus", "stochastic_states"])
@pytest.mark.parametrize("before", [True, False], ids=["before the first step", "in the middle"])
def test_a_shallow_copy_is_the_same_run_in_two_objects(strategy: str, before: bool) -> None:
    """As in torch: parameters, states and groups are shared. Steps by turns are those of one optimizer."""
    make = new_run if before else in_the_middle
    (model, optimizer), run = make(strategy), make(strategy)
    other = copy.copy(optimizer)
    for i, turn in enumerate((other, optimizer, other)):
        train(model, turn, [5 + i])
    train(*run, [5, 6, 7])
    assert differences(snapshot(optimizer), snapshot(run[1])) == []
    assert differences(snapshot(other), snapshot(run[1])) == []
    assert skipped_steps(other) == skipped_steps(optimizer) == skipped_steps(run[1])


@pytest.mark.parametrize("options", [StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)])
@pytest.mark.parametrize("strategy", ["plus", "stochastic_states"])
def test_skipped_steps_go_through_distributed_checkpoints(
    strategy: str, options: StateDictOptions, tmp_path: Path
) -> None:
    run, other = in_the_middle(strategy), new_run(strategy, seed=1)
    run[1].zero_grad()
    saved = get_state_dict(*run, options=options)
    state_dict_saver.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=tmp_path)
    weights, states = get_state_dict(*other, options=options)
    state_dict_loader.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
    set_state_dict(*other, model_state_dict=weights, optim_state_dict=states, options=options)
    assert skipped_steps(other[1]) == 2
    found, whole = go_on(other), go_on(run)
    assert differences(found[0], whole[0]) == []
    assert found[1:] == whole[1:]


def test_an_optimizer_rebuilt_from_class_and_groups_keeps_the_count() -> None:
    """What ZeRO-1 and trainers do."""
    model, optimizer = in_the_middle("plus")
    make: Any = type(optimizer)
    other = make([dict(group) for group in optimizer.param_groups], lr=1e-2)
    assert skipped_steps(other) == 2
    assert len(list(model.parameters())) == len(other.param_groups[0]["params"])


def test_a_checkpoint_from_before_there_was_a_count_starts_at_zero() -> None:
    model, optimizer = in_the_middle("plus")
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["collage_skipped"]
    optimizer.load_state_dict(saved)
    assert skipped_steps(optimizer) == 0
    skip((model, optimizer), 9)
    assert skipped_steps(optimizer) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_written_in_a_copy_are_noticed_there_and_not_in_the_original(
    steps: int, duplicate: Callable[[Any], Any]
) -> None:
    run = new_run("plus")
    train(*run, range(steps))
    model, optimizer = duplicate(run)
    with torch.no_grad():
        first(model).mul_(0.1)  # of which an old low word is many ulps
    p = first(model)
    assert ((p.float() + optimizer.state[p]["param_lo"].float() - p.float()).abs() > 2.0**-8 * p.float().abs()).any()
    for _ in range(2):
        assert ((exact_value(optimizer, p) - p.float()).abs() <= 2.0**-8 * p.float().abs()).all()
        external_writes.drop_stale(optimizer)
    before = exact_value(run[1], first(run[0]))
    external_writes.drop_stale(run[1])
    assert torch.equal(exact_value(run[1], first(run[0])), before)
    assert not torch.equal(before, first(run[0]).float())


def test_parameters_exchanged_in_a_copy_before_its_first_step_take_their_low_words() -> None:
    """What a move to an XLA device does."""
    model, optimizer = copy.deepcopy(new_run("plus"))
    group = optimizer.param_groups[0]
    value = exact_value(optimizer, group["params"][0])
    group["params"][0] = nn.Parameter(group["params"][0].detach().clone())
    optimizer.state_dict()
    assert torch.equal(exact_value(optimizer, group["params"][0]), value)
    assert len(list(model.parameters())) == len(group["params"])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle])
def test_a_copy_is_not_watched_and_may_get_a_monitor_of_its_own(duplicate: Callable[[Any], Any]) -> None:
    model, optimizer = new_run("plus")
    monitor = collage_neuron.monitor(optimizer)
    train(model, optimizer, range(2))
    other = duplicate(optimizer)
    own = collage_neuron.monitor(other)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step()
    assert (len(monitor.history), len(own.history)) == (2, 1)


Form = Callable[[nn.Module, Optimizer], Any]

ORDINARY: dict[str, Form] = {
    "(model, optimizer)": collage_neuron.compile,
    "(optimizer)": lambda model, optimizer: collage_neuron.compile(optimizer),
    "(class)": lambda model, optimizer: (model, collage_neuron.compile(AdamW)(model.bfloat16().parameters(), lr=1e-2)),
}
"""The forms of `compile` that have the optimizer at hand, or make it."""


def stepped(form: Form) -> tuple[nn.Module, Optimizer]:
    model = mlp()
    compiled = form(model, AdamW(model.parameters(), lr=1e-2))
    optimizer = compiled[1] if isinstance(compiled, tuple) else compiled
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("form", ORDINARY)
def test_no_module_has_a_table_or_a_set_with_an_optimizer_a_parameter_or_a_state(form: str) -> None:
    model, optimizer = stepped(ORDINARY[form])
    collage_neuron.monitor(optimizer)
    held = {id(optimizer), id(model), *map(id, model.parameters())}
    held |= {id(value) for state in optimizer.state.values() for value in state.values()}
    ours = [(name, vars(module)) for name, module in sys.modules.items() if name.startswith("collage_neuron")]
    kinds = (dict, set, list, WeakKeyDictionary, WeakSet)
    tables = [(name, k, t) for name, names in ours for k, t in names.items() if isinstance(t, kinds)]
    assert len(tables) > 10
    assert not [(name, k) for name, k, t in tables if any(id(key) in held for key in list(t))]
    assert not [(name, k) for name, k, t in tables if isinstance(t, dict) and any(id(x) in held for x in t.values())]


@pytest.mark.parametrize("form", ORDINARY)
def test_no_hook_of_the_process_is_registered(form: str) -> None:
    before = [list(hooks.values()) for hooks in HOOKS_OF_ALL]
    stepped(ORDINARY[form])
    assert [list(hooks.values()) for hooks in HOOKS_OF_ALL] == before


def test_a_copy_of_a_compiled_optimizer_is_stepped_by_its_class_before_it_was_compiled() -> None:
    """What the hook of the optimizer, which copies get too, makes the compiled step."""
    (model, optimizer), (twin, other) = through_pickle(new_run("plus")), new_run("plus")
    for i in range(2):
        optimizer.zero_grad()
        other.zero_grad()
        backward(model, i)
        AdamW.step(optimizer)
        train(twin, other, [i])
    assert differences(snapshot(optimizer), snapshot(other)) == []
