"""Optimizers that treat the parameters of one group differently: compiled as they are, or refused, nothing changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import unlike
from planned import plan
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.recording import independence

pytestmark = pytest.mark.usefixtures("rejecting")

Params = list[torch.nn.Parameter]
Class = Any  # a class of optimizers; each has a constructor of its own
STEPS = 4
ELSE = r"does something else to param_groups\[0\]\['params'\]\[{}\] than to such a parameter alone.*parameter groups"


def params(dtype: torch.dtype = torch.float32) -> Params:
    """A matrix and a vector of ones."""
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((4, 4), (4,))]


def slow_vector(ps: Params) -> None:
    ps[1].lr_scale = 0.1  # type: ignore[attr-defined]


def of_slow_class(ps: Params) -> None:
    ps[1] = unlike.AttributeOfItsClass.Slow(ps[1].detach())


def with_main_grad(ps: Params) -> None:
    ps[1].main_grad = torch.ones(4, dtype=ps[1].dtype)  # type: ignore[attr-defined]


def rated(key: Callable[[Any], Any]) -> Callable[[Params], None]:
    return lambda ps: unlike.RATES.update({key(ps[1]): 0.1})


def as_they_are(ps: Params) -> None:
    pass


def named(ps: Params) -> Any:
    return [("weight", ps[0]), ("bias", ps[1])]


def grouped(ps: Params) -> Any:
    return [{"params": [p]} for p in ps]


@pytest.fixture(autouse=True)
def _empty_dictionaries() -> Iterator[None]:
    yield
    unlike.RATES.clear()
    unlike.MOMENTA.clear()


COMPILED: dict[str, tuple[Class, Callable[[Params], None]]] = {
    "control": (unlike.Descent, as_they_are),
    "harmless": (unlike.Harmless, as_they_are),
    "attribute": (unlike.Attribute, slow_vector),
    "attribute_of_its_class": (unlike.AttributeOfItsClass, of_slow_class),
    "attribute_that_no_parameter_has": (unlike.TensorAttribute, as_they_are),
}

REFUSED: dict[str, tuple[Class, Callable[[Params], None], Callable[[Params], Any], str]] = {
    "layer_wise": (unlike.LayerWise, as_they_are, list, ELSE.format(0)),
    "first": (unlike.First, as_they_are, list, ELSE.format(1)),
    "named": (unlike.Named, as_they_are, named, ELSE.format(1)),
    "size": (unlike.Size, as_they_are, list,
             r"something else to param_groups\[0\]\['params'\]\[0\], param_groups\[0\]\['params'\]\[1\] than to such"),
    "keyed_by_id": (unlike.KeyedById, as_they_are, list, ELSE.format(1)),
    "held": (unlike.Held, as_they_are, list, ELSE.format(1)),
    "counted": (unlike.CountedInTheLoop, as_they_are, list,
                r"advances param_groups\[0\]\['t'\] from parameter to parameter.*count once a step"),
    "module_by_id": (unlike.ModuleById, rated(id), list, ELSE.format(1)),
    "module_by_parameter": (unlike.ModuleByParameter, rated(lambda p: p), list, ELSE.format(1)),
    "listed": (unlike.Listed, as_they_are, list, ELSE.format(0)),
    "by_group": (unlike.ByGroup, as_they_are, grouped,
                 r"does something else to param_groups\[1\]\['params'\]\[0\]"),
    "counted_by_group": (unlike.CountedByGroup, as_they_are, grouped,
                         r"advances optimizer\.count from parameter to parameter"),
}  # fmt: skip
"""What only the joint steps show."""

REFUSED_ALONE: dict[str, tuple[Class, Callable[[Params], None], str]] = {
    "module_momentum": (
        unlike.ModuleMomentum,
        as_they_are,
        r"keeps tensors in unlike\.MOMENTA; keep each in optimizer",
    ),
    "buffer": (unlike.Buffer, as_they_are, r"keeps something in p\.buf, .*keep it in optimizer\.state\[p\]"),
    "counting_attribute": (unlike.CountingAttribute, as_they_are, r"keeps something in p\.steps"),
    "tensor_attribute": (unlike.TensorAttribute, with_main_grad, r"reads p\.main_grad, an attribute .* Tensor;"),
    "neighbour": (unlike.Neighbour, as_they_are, r"updates .*\['params'\]\[\d\] with tensors of .*\['params'\]\[\d\]"),
    "own_list": (unlike.OwnList, as_they_are, r"writes to a tensor that is neither .*; take parameters from optimizer"),
}
"""What a recording of one parameter shows too, or would fail in."""


def step(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def exact_run(cls: Class, mark: Callable[[Params], None], groups: Callable[[Params], Any]) -> Params:
    """The optimizer's own run in float64."""
    ps = params(torch.float64)
    mark(ps)
    optimizer = cls(groups(ps))
    for _ in range(STEPS):
        step(optimizer)
    return ps


def error(cls: Class, mark: Callable[[Params], None], groups: Callable[[Params], Any]) -> float:
    """How far a compiled run is from that."""
    ps = params()
    mark(ps)
    optimizer = collage_neuron.compile(cls(groups(ps)), strategy="full")
    for _ in range(STEPS):
        step(optimizer)
    exact = exact_run(cls, mark, groups)
    values = [collage_neuron.exact_value(optimizer, p).double() for p in ps]
    return max(float((v - e.detach()).abs().max()) for v, e in zip(values, exact, strict=True))


# Values stay below 4. Each step stores a pair (2**-17 of the value), from arithmetic in fp32 (less than that).
BOUND = STEPS * 4 * 2 * 2**-17


@pytest.mark.parametrize("name", COMPILED)
def test_what_can_be_followed_is_compiled_and_equal(name: str) -> None:
    cls, mark = COMPILED[name]
    assert error(cls, mark, list) <= BOUND
    first, second = (float(p.detach().mean()) for p in exact_run(cls, mark, list))
    assert (abs(first - second) > 100 * BOUND) == (name in ("attribute", "attribute_of_its_class"))


def refused(cls: Class, mark: Callable[[Params], None], groups: Callable[[Params], Any], message: str) -> None:
    ps = params()
    mark(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer = cls(groups(ps))
    attributes, dictionaries = copy.deepcopy([vars(p) for p in ps]), [set(unlike.RATES), set(unlike.MOMENTA)]
    with pytest.raises(UnsupportedUpdate, match=rf"{cls.__name__} cannot be compiled: .*{message}|{message}"):
        collage_neuron.compile(optimizer)
    assert type(optimizer) is cls
    assert all(torch.equal(p.detach(), torch.ones_like(p)) and p.dtype == torch.float32 for p in ps)
    assert not optimizer.state
    assert [g.get("t") for g in optimizer.param_groups] == [0] * len(optimizer.param_groups)
    assert str([vars(p) for p in ps]) == str(attributes)
    assert not {p for p in ps if id(p) in unlike.MOMENTA}
    assert set(unlike.RATES) == dictionaries[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_all_parameters_together_show_is_refused_and_left_as_it_was(name: str) -> None:
    refused(*REFUSED[name])


@pytest.mark.parametrize("name", REFUSED_ALONE)
def test_what_one_parameter_shows_is_refused_and_left_as_it_was(name: str) -> None:
    cls, mark, message = REFUSED_ALONE[name]
    refused(cls, mark, list, message)


@pytest.mark.mutants
@pytest.mark.parametrize("name", REFUSED)
def test_without_the_check_each_is_compiled_and_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "check", lambda base, optimizer: None)
    monkeypatch.setattr(independence, "check_numbers", lambda *_: None)
    cls, mark, groups, _ = REFUSED[name]
    assert error(cls, mark, groups) > 100 * BOUND


def test_an_optimizer_of_a_compiled_class_is_refused_in_its_first_step() -> None:
    ps = params(torch.bfloat16)
    optimizer = collage_neuron.compile(unlike.LayerWise)(ps)
    with pytest.raises(UnsupportedUpdate, match=ELSE.format(0)):
        step(optimizer)
    assert all(torch.equal(p.detach(), torch.ones_like(p)) for p in ps)
    assert not optimizer.state


def test_a_step_that_takes_another_road_is_checked_again() -> None:
    ps = params()
    optimizer = collage_neuron.compile(unlike.LaterFirst(ps))
    step(optimizer)
    step(optimizer)
    before = [p.detach().clone() for p in ps]
    with pytest.raises(UnsupportedUpdate, match=ELSE.format(1)):
        step(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))
    assert [optimizer.state[p]["step"] for p in ps] == [2, 2]


def test_a_group_that_is_added_is_checked() -> None:
    ps = params(torch.bfloat16)
    optimizer = collage_neuron.compile(unlike.ByGroup(ps[:1]))
    step(optimizer)
    optimizer.add_param_group({"params": ps[1:]})
    with pytest.raises(UnsupportedUpdate, match=r"param_groups\[1\]\['params'\]\[0\]"):
        step(optimizer)


def test_the_same_road_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    check = independence.check

    def counted(base: Class, optimizer: Optimizer) -> None:
        checks.append(optimizer)
        check(base, optimizer)

    monkeypatch.setattr(independence, "check", counted)
    optimizer = collage_neuron.compile(AdamW(params()))
    for _ in range(STEPS):
        step(optimizer)
    assert len(checks) == 1


def test_attributes_that_no_step_asks_for_cost_no_recordings() -> None:
    ps = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    for cls, recordings in ((AdamW, 1), (unlike.Attribute, 3)):
        for i, p in enumerate(ps):
            p.lr_scale, p.grad = i, torch.ones_like(p)  # type: ignore[attr-defined]
        optimizer = collage_neuron.compile(cls(ps))
        assert len(plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)) == recordings


def test_an_attribute_that_is_changed_between_steps_is_followed() -> None:
    ps = params()
    optimizer = collage_neuron.compile(unlike.Attribute(ps), strategy="full")
    step(optimizer)
    slow_vector(ps)
    step(optimizer)
    moved = [float(1 - collage_neuron.exact_value(optimizer, p).mean()) for p in ps]
    assert moved == pytest.approx([0.25, 0.1375], abs=BOUND)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.RAdam, torch.optim.ASGD])
def test_parameters_with_and_without_dimensions_states_and_gradients_are_alike(cls: Class) -> None:
    """As they are in the middle of a training run that froze some of them at first."""
    ps = [torch.nn.Parameter(torch.ones(shape)) for shape in ((), (1,), (3, 2), (0,), (3, 2))]
    optimizer = cls([*grouped(ps[:2]), {"params": ps[2:]}])
    for p in ps[1:4]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    independence.check(cls, optimizer)
