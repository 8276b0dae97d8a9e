"""A state is loaded whole or, with an error that names the key, not at all; low words never belong to other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loading_cases import adamw, compiled, ours
from models import REPRESENTATIVE, differences, mlp, parameters, set_gradients, snapshot, train
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, NAdam, Optimizer, RMSprop, Rprop

import collage_neuron
from collage_neuron import RoundedWeights


def plain(make: Callable[[nn.Module], Optimizer] = adamw) -> dict[str, Any]:
    """A checkpoint of torch's own optimizer in fp32."""
    model = mlp()
    optimizer = make(model)
    train(model, optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


Change = Callable[[dict[str, Any]], object]


def drop(index: int, key: str) -> Change:
    return lambda saved: saved["state"][index].pop(key)


def put(index: int, **entries: Any) -> Change:
    return lambda saved: saved["state"][index].update(entries)


NOTHING = r"^the checkpoint was not loaded, and nothing was changed: "

OTHER = r"is it truncated, or the checkpoint of another optimizer\?"

TRUNCATED: dict[str, tuple[Change, str]] = {
    "no state": (lambda s: s.pop("state"), r"it has no 'state'; found 'param_groups': is it an optimizer's state_dict"),
    "no groups": (lambda s: s.pop("param_groups"), r"it has no 'param_groups'; found 'state'"),
    "empty": (lambda s: s.clear(), r"it has no 'state'; found nothing"),
    "no params": (lambda s: s["param_groups"][0].pop("params"), r"param_groups\[0\] has no 'params'"),
    "one group more": (lambda s: s["param_groups"].append({"params": []}), "it has 2 param_groups and the optimizer 1"),
    "a parameter less": (
        lambda s: s["param_groups"][0]["params"].pop(),
        r"param_groups\[0\] has 5 parameters and the optimizer's 6",
    ),
    "no first moment": (
        drop(3, "exp_avg"),
        rf"state\[3\] has (no 'exp_avg', which AdamW needs; .*{OTHER}|'exp_avg_lo' and not 'exp_avg')",
    ),
    "no step": (drop(2, "step"), rf"state\[2\] has no 'step', which AdamW needs; it has exp_avg, exp_avg_sq: {OTHER}"),
    "stranger": (lambda s: s["state"].update({9: {}}), r"state\[9\] belongs to none of its param_groups"),
    "no mapping": (
        lambda s: s["state"].update({0: torch.ones(2)}),
        r"state\[0\] is a Tensor and not a mapping of name",
    ),
    "shape": (
        put(4, exp_avg_sq=torch.ones(16, 1)),
        r"state\[4\]\['exp_avg_sq'\] has shape \[16, 1\] and the parameter",
    ),
    "integers": (put(1, exp_avg=torch.ones(16, dtype=torch.int32)), r"state\[1\]\['exp_avg'\] is torch.int32; states"),
}

OF_OURS: dict[str, tuple[Change, str]] = {
    "no second word": (drop(5, "exp_avg_sq_lo"), r"state\[5\] has no 'exp_avg_sq_lo', the low word of 'exp_avg_sq'"),
    "no second word of a value": (
        lambda s: put(5, exp_avg_sq=s["state"][5].pop("exp_avg_sq_lo").float())(
            s
        ),  # as DCP reads it where there is none
        r"state\[5\] has no 'exp_avg_sq_lo', the low word of 'exp_avg_sq', which was saved as bf16\+int8: is it",
    ),
    "a narrow word": (
        lambda s: s["param_groups"][0].update(
            collage_formats=s["param_groups"][0]["collage_formats"].replace('g": "bf16+int8', 'g": "bf16+int16')
        ),
        r"state\[0\] has a narrower 'exp_avg_lo', the low word of 'exp_avg', which was saved as bf16\+int16",
    ),
    "no word of the parameter": (drop(0, "param_lo"), r"state\[0\] has no 'param_lo', the low word of 'param'"),
    "no state of a parameter": (
        lambda s: s["state"].pop(0),
        r"it has no state\[0\], and its param_groups say that this parameter has low words \(bf16\+int16\): is it trun",
    ),
    "an empty state": (lambda s: s["state"][5].clear(), r"it has no state\[5\], and its param_groups say"),
    "no states": (lambda s: s["state"].clear(), r"it has no state\[0\], and its param_groups say"),
    "no first word": (
        drop(0, "exp_avg_sq"),
        r"state\[0\] has 'exp_avg_sq_lo' and not 'exp_avg_sq', which it is the sec",
    ),
    "strategy": (
        lambda s: s["param_groups"][0].update(collage_strategy="pluss"),
        r"param_groups\[0\]: unknown strategy 'pluss'; choose one of",
    ),
}


def is_refused(optimizer: Optimizer, saved: dict[str, Any], message: str) -> None:
    """Nothing is changed, and the next step is the one that would have been taken."""
    twin = copy.deepcopy(optimizer)
    before, state, groups = snapshot(optimizer), optimizer.state, optimizer.param_groups
    with pytest.raises(ValueError, match=NOTHING + message):
        optimizer.load_state_dict(saved)
    assert optimizer.state is state
    assert optimizer.param_groups is groups
    assert differences(snapshot(optimizer), before) == []
    for o in (optimizer, twin):
        set_gradients([p for group in o.param_groups for p in group["params"]], 7)
        o.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []


REFUSED = [*((source, name) for source in (plain, ours) for name in TRUNCATED), *((ours, name) for name in OF_OURS)]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("fresh", [True, False], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize(("source", "name"), REFUSED)
def test_a_truncated_checkpoint_is_refused_by_the_key(name: str, source: Callable[[], Any], fresh: bool) -> None:
    change, message = (TRUNCATED | OF_OURS)[name]
    saved = source()
    change(saved)
    is_refused(compiled(steps=0 if fresh else 2, seed=1)[1], saved, message)


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
def test_a_state_that_is_missing_is_told_where_keys_tell_the_formats(strategy: str) -> None:
    """Nothing in the checkpoint says whether it was ever there: a bf16 parameter without a gradient has none."""
    saved, (_, optimizer) = ours(strategy), compiled(strategy)
    before = snapshot(optimizer)
    del saved["state"][0]
    with pytest.raises(RoundedWeights, match=r"has no state\[0\], and low words of other parameters: unless that para"):
        optimizer.load_state_dict(saved)  # warnings are errors in these tests
    assert differences(snapshot(optimizer), before) == []


def of_another_model() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))
    train(model, optimizer := adamw(model), [0])
    return optimizer.state_dict()


NO_BETAS = rf"param_groups\[0\] has no 'betas', which AdamW needs; it has lr, momentum, .*: {OTHER}"
OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "without states": (lambda: plain(lambda model: SGD(model.parameters(), lr=0.1)), NO_BETAS),
    "RMSprop": (lambda: plain(lambda model: RMSprop(model.parameters(), lr=0.1)), NO_BETAS),
    "momentum": (
        lambda: plain(lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9)),
        rf"state\[0\] has no 'step', which AdamW needs; it has momentum_buffer.*: {OTHER}",
    ),
    "model": (of_another_model, r"state\[2\]\['exp_avg'\] has shape \[8, 16\] and the paramete"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_checkpoint_of_another_optimizer_or_model_is_refused_by_the_key(name: str) -> None:
    saved, message = OTHERS[name]
    is_refused(compiled()[1], saved(), message)


@pytest.mark.parametrize("saved", [3, None, [("state", {})]])
def test_what_is_no_mapping_is_refused(saved: Any) -> None:
    with pytest.raises(TypeError, match=rf"is a mapping, got {type(saved).__name__}"):
        compiled()[1].load_state_dict(saved)


def test_an_error_in_a_users_own_hook_takes_the_loading_back() -> None:
    _, optimizer = compiled()
    saved, before = ours(), snapshot(optimizer)

    def fails(_: Optimizer) -> None:
        raise OSError("disk")

    optimizer.register_load_state_dict_post_hook(fails)
    with pytest.raises(OSError, match="disk"):
        optimizer.load_state_dict(saved)
    assert differences(snapshot(optimizer), before) == []


MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2, amsgrad=True),
    "nadam": lambda ps: NAdam(ps, lr=1e-2),
    "sgd": lambda ps: SGD(ps, lr=1e-2),
    "momentum": lambda ps: SGD(ps, lr=1e-2, momentum=0.9, dampening=0.1),
    "rmsprop": lambda ps: RMSprop(ps, lr=1e-2, momentum=0.9, centered=True),
    "adagrad": lambda ps: Adagrad(ps, lr=1e-2),  # has its state before it steps
    "rprop": lambda ps: Rprop(ps, lr=1e-2),
}


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("strategy", REPRESENTATIVE)
@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_that_was_saved_is_never_refused(name: str, strategy: str) -> None:
    """At any step, also where an update has another graph in its first step, or a word is not there yet."""
    for steps in range(4):
        params = parameters()
        optimizer = collage_neuron.compile(MAKE[name](params), strategy=strategy)
        for i in range(steps):
            set_gradients(params, i)
            params[1].grad = params[1].grad if i > 1 else None
            optimizer.step()
        others = [nn.Parameter(p.detach().clone()) for p in params]
        other = collage_neuron.compile(MAKE[name](others), strategy=strategy)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for ps, o in ((params, optimizer), (others, other)):
            set_gradients(ps, 9)
            o.step()
        assert differences(snapshot(other), snapshot(optimizer)) == []
