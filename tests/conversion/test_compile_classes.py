"""The class form of `compile`: what sharding wrappers and trainers do to it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from compile_forms import adamw, by_both
from models import backward, bits, differences, mlp, parameters, set_gradients, snapshot, train
from torch.optim import SGD, Adam, AdamW, Optimizer

import collage_neuron


@pytest.mark.parametrize("base", [SGD, Adam, AdamW])
def test_rebuilding_from_class_groups_and_defaults_keeps_the_settings(base: type[Optimizer]) -> None:
    first: Any = collage_neuron.compile(base, strategy="light", arithmetic="bf16")
    given = first(parameters(dtype=torch.bfloat16), lr=1e-2)
    given.param_groups[0]["collage_strategy"] = "full"
    for rebuilt in (type(given)(given.param_groups, **given.defaults), type(given)(given.param_groups)):
        assert type(rebuilt) is first
        assert rebuilt.param_groups[0]["collage_strategy"] == "full"
        rebuilt.add_param_group({"params": parameters(dtype=torch.bfloat16)})
        assert rebuilt.param_groups[1]["collage_strategy"] == "light"
        assert rebuilt.param_groups[1]["collage_arithmetic"] == "bf16"


@pytest.mark.parametrize("wrong", [{"learning_rate": 0.1}, {"decoupled_weight_decay": False}])
def test_an_argument_that_the_optimizer_does_not_take_is_refused(wrong: dict[str, Any]) -> None:
    compiled: Any = collage_neuron.compile(AdamW)
    with pytest.raises(TypeError, match=f"AdamW takes no argument '{next(iter(wrong))}'"):
        compiled(parameters(dtype=torch.bfloat16), **wrong)


def test_settings_may_be_given_to_the_constructor_of_a_compiled_class() -> None:
    compiled: Any = collage_neuron.compile(SGD, strategy="light")
    optimizer = compiled(parameters(dtype=torch.bfloat16), lr=0.1, collage_strategy="full")
    assert optimizer.param_groups[0]["collage_strategy"] == "full"


class Decorated(collage_neuron.compile(SGD)):  # type: ignore[misc]  # a class made at run time
    """A user's subclass of a compiled class."""

    label = "mine"


def test_a_subclass_of_a_compiled_class_pickles_as_itself() -> None:
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated


class Doubled(collage_neuron.compile(SGD)):  # type: ignore[misc]  # a class made at run time
    """A user's subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = 2 * p.grad
        return super().step(closure)


def test_one_that_updates_weights_itself_is_told() -> None:
    with pytest.warns(UserWarning, match=r"Alone.step\(\) does not call super\(\).step\(\)"):

        class Alone(collage_neuron.compile(SGD)):  # type: ignore[misc]  # a class made at run time
            def step(self, closure: Any = None) -> Any: ...


def test_a_subclass_of_a_compiled_class_may_have_a_step_of_its_own() -> None:
    params, twins = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    collage_neuron.compile(SGD(parameters()))  # from now on every step of the process is looked at
    plain: Any = collage_neuron.compile(SGD)
    mine, other = Doubled(params, lr=1e-2), plain(twins, lr=2e-2)
    for group, optimizer in zip((params, twins), (mine, other), strict=True):
        set_gradients(group, 0)
        optimizer.step()
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(params, twins, strict=True))
    assert not torch.equal(mine.state[params[0]]["param_lo"], torch.zeros_like(params[0]))


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_a_step_that_was_kept_from_before_compiling_is_the_compiled_one(form: str) -> None:
    """Also its hooks run once; one that is added after compiling sees gradients before they are used."""
    model, twin = mlp(), mlp()
    optimizer, other = adamw(model), by_both(twin)
    kept, calls = optimizer.step, []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    if form == "(model)":
        collage_neuron.compile(model)
    else:
        collage_neuron.compile(model, optimizer)

    def double(o: Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in o.param_groups for p in group["params"]):
            p.grad.mul_(2)

    for each in (optimizer, other):
        each.register_step_pre_hook(double)
    for i in range(3):
        optimizer.zero_grad()
        backward(model, i)
        kept()
        train(twin, other, [i])
    assert differences(snapshot(optimizer), snapshot(other)) == []
    assert calls == ["before", "after"] * 3
