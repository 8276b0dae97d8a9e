"""Optimizers that treat parameters differently from a later step on, with the same operations: that step is rejected.

The graph shows nothing of it, and neither does validation, whose twin has one parameter.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import unlike_later
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture import position_aware
from collage_neuron.recording import independence
from collage_neuron.states.bookkeeping import bookkeeping

pytestmark = pytest.mark.usefixtures("rejecting")

Class = Any  # a class of optimizers; each has a constructor of its own


def made(cls: Class) -> Any:
    """A compiled optimizer of two parameters, in groups of their own where the class looks at groups."""
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 4), (4,))]
    groups = [{"params": [p]} for p in ps] if cls is unlike_later.ByGroup else ps
    return collage_neuron.compile(cls(groups), strategy="full")


def params(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer) -> None:
    for p in params(optimizer):
        p.grad = torch.ones_like(p)
    optimizer.step()


def kept(optimizer: Any) -> str:
    """Everything that a step may change, as text."""
    values = [collage_neuron.exact_value(optimizer, p) for p in params(optimizer)]
    states = [optimizer.state.get(p, {}) for p in params(optimizer)]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return repr((values, states, groups, getattr(optimizer, "n", 0), getattr(optimizer, "k", 0)))


@pytest.mark.parametrize("cls", unlike_later.LATER)
def test_the_step_that_would_go_wrong_is_rejected_and_changes_nothing(cls: Class) -> None:
    optimizer = made(cls)
    for _ in range(unlike_later.AT - 1):
        step(optimizer)
    before = copy.deepcopy(kept(optimizer))
    with pytest.raises(UnsupportedUpdate, match=rf"{cls.__name__} cannot be compiled: .*step\(\) (does|advances)"):
        step(optimizer)
    assert kept(optimizer) == before


@pytest.mark.parametrize("cls", [*unlike_later.LATER, unlike_later.Independent])
def test_only_code_that_may_tell_parameters_apart_is_compared_in_every_step(cls: Class) -> None:
    optimizer = made(cls)
    step(optimizer)
    assert bookkeeping(optimizer).compared == ("doubling" if cls is unlike_later.Independent else "all")


def test_other_code_is_compared_when_the_number_of_steps_has_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second net: here the signs are taken away."""
    monkeypatch.setattr(position_aware, "signs", lambda base, optimizer: [])
    optimizer = made(unlike_later.First)
    for _ in range(15):
        step(optimizer)
    with pytest.raises(UnsupportedUpdate, match=r"something else to param_groups\[0\]\['params'\]\[1\]"):
        step(optimizer)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_torchs_own_classes_are_not_compared_again(cls: Class, monkeypatch: pytest.MonkeyPatch) -> None:
    assert position_aware.is_of_torch(cls)
    if cls is torch.optim.Adafactor:  # not elementwise
        return
    optimizer = made(cls)
    monkeypatch.setattr(independence, "confirm", lambda *_, **__: pytest.fail("compared"))
    for _ in range(4):
        step(optimizer)


def test_a_class_of_torch_whose_step_was_replaced_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim.SGD, "step", unlike_later.First.step)
    assert not position_aware.is_of_torch(torch.optim.SGD)
    assert not position_aware.is_of_torch(unlike_later.First)


@pytest.mark.parametrize("names", [{}, {"__name__": "notebook"}])
def test_code_without_source_is_compared_in_every_step(names: dict[str, Any]) -> None:
    known = {"Plain": unlike_later.Plain, **names}
    exec("class Unknown(Plain):\n    def step(self, closure=None):\n        pass", known)
    cls: Class = known["Unknown"]
    assert position_aware.signs(cls, cls([torch.nn.Parameter(torch.ones(4))]))


def test_differentiable_set_between_steps_is_rejected() -> None:
    optimizer = made(torch.optim.AdamW)
    step(optimizer)
    optimizer.param_groups[0]["differentiable"] = True
    before = kept(optimizer)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has differentiable=True"):
        step(optimizer)
    assert kept(optimizer) == before
