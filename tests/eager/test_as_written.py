"""Steps on fp32 values give what the same optimizer gives in fp32: bit for bit where the strategy stores fp32.

Those that turn out to be launched give it within what arithmetic in another order rounds.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from as_written import (
    ALL,
    LAUNCHED,
    Adafactor,
    Lamb,
    Make,
    Muon,
    Noisy,
    Prodigy,
    Shampoo,
    Written,
    compiled,
    equal,
    error,
    everything,
    in_fp32,
    near,
    parameters,
    run,
    values,
)
from models import through_torch_save
from running import compiled_only
from torch.optim import SGD

import collage_neuron
from collage_neuron import checkpoint
from collage_neuron.errors import RunsAsWritten
from collage_neuron.states.bookkeeping import bookkeeping


@pytest.mark.parametrize("make", ALL)
def test_under_the_strategy_fp32_each_is_that_of_fp32_bit_for_bit_if_it_runs_as_written(make: Make) -> None:
    optimizer, params = compiled(make, "fp32")
    run(optimizer, 8)
    found, exact = values(optimizer, params), in_fp32(make, 8)
    assert bool(bookkeeping(optimizer).as_written) == (make not in LAUNCHED)
    assert near(found, exact, 8) if make in LAUNCHED else equal(found, exact)
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, v.bfloat16()) for p, v in
               zip(params, values(optimizer, params), strict=True))  # fmt: skip


class WithoutRules(Written):
    """A momentum through functions of which no published optimizer computes an update, so that none has a rule."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (g := g.clone())[g > 0.5] = torch.tensor(0.5)
        m = state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.9).add_(g)
        bent = torch.erf(m) + torch.logaddexp(m, g).sinh() * torch.atan(m) + g.sin().clone().fmod_(0.03)
        p.sub_(torch.where(torch.heaviside(g, m) > 0, bent, torch.hypot(m, g) // 0.5), alpha=group["lr"])


def test_functions_without_a_rule_are_those_of_torch_in_fp32() -> None:
    optimizer, params = compiled(WithoutRules, "fp32")
    run(optimizer, 8)
    assert bookkeeping(optimizer).as_written
    assert equal(values(optimizer, params), in_fp32(WithoutRules, 8))
    optimizer, params = compiled(WithoutRules, "full")
    run(optimizer, 8)
    assert error(values(optimizer, params), in_fp32(WithoutRules, 8)) < 8 * 2**-16


@pytest.mark.parametrize("make", [Muon, Lamb, Adafactor])
@pytest.mark.parametrize(("strategy", "digits"), [("full", 16), ("split444", 23), ("light", 7)])
def test_other_strategies_are_as_far_off_as_their_formats_round(make: Make, strategy: str, digits: int) -> None:
    """Each step stores the weights (up to 2, moved by 0.02 a step) and the states once, which feed into one another."""
    optimizer, params = compiled(make, strategy)
    plain = make(parameters(torch.bfloat16))
    run(optimizer, 30)
    run(plain, 30)
    exact = in_fp32(make, 30)
    found = error(values(optimizer, params), exact)
    assert found < 30 * 2**-digits
    if strategy != "light":
        assert found < error([p.detach() for p in plain.param_groups[0]["params"]], exact) / 50


OF_BYTES = [{"param": "bf16+int16", "momentum_buffer": name} for name in ("i8q4", "i16q8", "bf16+int8")]


# Lamb and Prodigy keep numbers in attributes, which no checkpoint of torch has.
@pytest.mark.parametrize(
    ("make", "strategy"),
    [*product([Muon, Adafactor, Shampoo, Noisy], ["plus", "split423"]), *product([Muon], OF_BYTES)],
)
def test_a_checkpoint_resumes_bit_for_bit(make: Make, strategy: Any) -> None:
    whole, params = compiled(make, strategy)
    run(whole, 3)
    state, weights = through_torch_save((whole.state_dict(), [p.detach() for p in params]))
    resumed, others = compiled(make, strategy)
    for p, w in zip(others, weights, strict=True):
        p.data.copy_(w)
    resumed.load_state_dict(state)
    for optimizer in (whole, resumed):
        run(optimizer, 3, first=3)
    assert everything(resumed) == everything(whole)


@pytest.mark.parametrize("make", [Lamb, Shampoo, Prodigy, Noisy])
def test_copies_and_pickles_go_on_alike(make: Make) -> None:
    optimizer, _ = compiled(make, "plus")
    run(optimizer, 3)
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(optimizer, 3, first=3)
    for other in copies:
        run(other, 3, first=3)
        assert everything(other) == everything(optimizer)


def test_a_plain_checkpoint_of_fp32_is_loaded_and_written() -> None:
    model = torch.nn.ParameterList(parameters(torch.float32))
    plain = Adafactor(model)
    run(plain, 4)
    saved = copy.deepcopy((model.state_dict(), plain.state_dict()))
    run(plain, 4, first=4)
    other = torch.nn.ParameterList(parameters(torch.bfloat16))
    optimizer = collage_neuron.compile(Adafactor(other), strategy="fp32")
    checkpoint.set_fp32_state_dict(other, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    run(optimizer, 4, first=4)
    assert near(values(optimizer, list(other)), [p.detach() for p in model], 8)
    weights, state = checkpoint.get_fp32_state_dict(other, optimizer)
    assert equal(list(weights.values()), values(optimizer, list(other)))
    for found, expected in zip(state["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=8 * 2**-20, atol=8 * 2**-24)


def test_a_class_a_model_alone_and_a_group_added_later() -> None:
    exact = in_fp32(Lamb, 4)
    cls = collage_neuron.compile(Lamb, strategy="fp32")
    optimizer = cls(parameters(torch.bfloat16))
    run(optimizer, 4)
    assert near(values(optimizer, optimizer.param_groups[0]["params"]), exact, 4)
    model = collage_neuron.compile(torch.nn.ParameterList(parameters(torch.float32)), strategy="fp32")
    plain = Lamb(model)
    run(plain, 4)
    assert near(values(plain, list(model)), exact, 4)
    params = parameters(torch.bfloat16)
    grown = collage_neuron.compile(Lamb(params[:2]), strategy="fp32")
    grown.add_param_group({"params": params[2:]})
    run(grown, 4)
    assert near(values(grown, params), exact, 4)


class LooksInside(Written):
    """Asks for the memory of a value, which nobody knows before the step is taken."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if g.numpy().size else 2))


class Repeated(Written):
    """Raises an error of torch's while its values wait."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if torch.Tensor.tolist(g) else 2))


class LaterNorm(Written):
    """Elementwise until its fifth step."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        p.sub_(state["m"] if state["step"] < 5 else state["m"] / (1e-3 + state["m"].norm(3)), alpha=group["lr"])


def test_a_step_that_can_no_longer_be_captured_goes_on_as_written() -> None:
    optimizer, params = compiled(LaterNorm, "split444")
    with compiled_only():
        run(optimizer, 4)
    assert not bookkeeping(optimizer).as_written
    with pytest.warns(RunsAsWritten) as told:
        run(optimizer, 4, first=4)
    assert bookkeeping(optimizer).as_written
    assert len(told) == 1
    assert error(values(optimizer, params), in_fp32(LaterNorm, 8)) < 8 * 2**-20


def test_it_is_said_once_in_one_line() -> None:
    with pytest.warns(RunsAsWritten) as told:
        optimizer, _ = compiled(Muon)
    (record,) = told
    with compiled_only():  # which would raise another one
        run(optimizer, 3)
    assert record.filename.endswith("as_written.py")
    message = str(record.message)
    assert "\n" not in message
    assert message.startswith("Muon cannot be compiled: ")
    assert "step() of its only group runs as written, on fp32 values" in message
    assert "aten.permute" in message
    assert "collage_neuron.RunsAsWritten" in message
    text = collage_neuron.explain(optimizer)
    assert "momentum_buffer    fp32" in text
    assert "step() as written on fp32 values" in text
    assert "aten.permute" in text
    assert "uncompiled" not in text + message  # advice for optimizers that are rejected; this one runs
    assert re.search(r" \(at .*:\d+\)$", text) is not None


@compiled_only()
def test_a_filter_makes_it_an_error_before_anything_is_changed() -> None:
    optimizer = Muon(params := parameters(torch.float32))
    for _ in range(2):
        with pytest.raises(RunsAsWritten, match="not elementwise"):
            collage_neuron.compile(optimizer)
    assert type(optimizer) is Muon
    assert {p.dtype for p in params} == {torch.float32}


@pytest.mark.parametrize("make", [Muon, LooksInside, Repeated])
def test_so_it_does_in_a_step_of_which_nothing_was_known(make: type[Written]) -> None:
    """In each, however many there are; where the filter is gone it runs."""
    optimizer = collage_neuron.compile(make)(params := parameters(torch.bfloat16))
    before = everything(optimizer)
    with compiled_only():
        for _ in range(6):
            with pytest.raises(RunsAsWritten, match=f"{make.__name__} cannot be compiled: "):
                run(optimizer, 1)
            assert everything(optimizer) == before
    with pytest.warns(RunsAsWritten, match=f"{make.__name__} cannot be compiled: "):
        run(optimizer, 1)
    assert error(values(optimizer, params), in_fp32(make, 1)) < 2**-7


@pytest.mark.parametrize("unsupported", ["twin", "error"])
def test_the_setting_of_before_is_accepted_and_has_no_effect(unsupported: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"simplefilter\('error', collage_neuron.RunsAsWritten\)") as told:
        optimizer = collage_neuron.compile(Muon(parameters(torch.bfloat16)), unsupported=unsupported)
    assert {record.filename for record in told} == {__file__}
    run(optimizer, 1)


def test_groups_checkpoints_and_pickles_that_have_it_lose_it() -> None:
    key = "collage_unsupported"
    group: dict[str, Any] = {"params": parameters(torch.bfloat16), key: "error"}
    optimizer = collage_neuron.compile(SGD([group], lr=0.1))
    run(optimizer, 1)
    optimizer.add_param_group({"params": parameters(torch.bfloat16), key: "twin"})
    cls: Any = collage_neuron.compile(SGD)
    made = cls([dict(group)], lr=0.1, collage_unsupported="error")
    saved = optimizer.state_dict()
    for each in saved["param_groups"]:
        each[key] = "error"
    loaded = collage_neuron.compile(SGD([{"params": parameters(torch.bfloat16)} for _ in range(2)], lr=0.1))
    loaded.load_state_dict(saved)
    state = optimizer.__getstate__()
    state["defaults"] = optimizer.defaults | {key: "twin"}
    pickled = copy.copy(optimizer)
    pickled.__setstate__(state)
    for each in (optimizer, made, loaded, pickled):
        assert key not in each.defaults
        assert all(key not in group for group in each.param_groups)


def test_schedulers_hooks_and_a_state_of_no_parameter() -> None:
    class Global(Written):
        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            self.state["all"] = self.state.get("all", 0) + 1  # type: ignore[index,call-overload]
            p.sub_(g / g.norm(), alpha=group["lr"] / self.state["all"])  # type: ignore[index]

    seen: list[float] = []
    optimizer, params = compiled(Global, "fp32")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.register_step_post_hook(lambda o, a, k: seen.append(o.param_groups[0]["lr"]))
    plain = Global(parameters(torch.float32))
    other = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    for i in range(3):
        for o, s in ((optimizer, scheduler), (plain, other)):
            run(o, 1, first=i)
            s.step()
    assert seen == [0.02, 0.01, 0.005]
    assert near(values(optimizer, params), [p.detach() for p in plain.param_groups[0]["params"]], 3)
    assert optimizer.state["all"] == plain.state["all"]  # type: ignore[index]


def test_stochastic_rounding_is_reproducible_and_differs_between_values() -> None:
    both = [compiled(Prodigy, "stochastic_states", seed=3)[0] for _ in range(2)]
    for optimizer in both:
        run(optimizer, 4)
    assert everything(both[0]) == everything(both[1])
    assert both[0].param_groups[0]["collage_drawn"] == 4
    other, _ = compiled(Prodigy, "stochastic_states", seed=4)
    run(other, 4)
    assert everything(other) != everything(both[0])

    class Twice(Written):
        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not state and g.float().numpy().any():  # which makes the step run as written
                third = torch.full_like(p, 1 / 3)
                state.update(a=third.clone(), b=third.clone())

    optimizer, params = compiled(Twice, "stochastic_states")
    run(optimizer, 1)
    a, b = optimizer.state[params[0]]["a"], optimizer.state[params[0]]["b"]
    assert 0 < (a == b).float().mean() < 1


def test_an_optimizer_in_evaluation_mode_is_captured_when_it_trains() -> None:
    class Modes(Written):
        training = False

        def train(self) -> None:
            self.training = True

        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            if not self.training:
                raise RuntimeError("call train() first")
            p.sub_(g, alpha=group["lr"])

    optimizer, _ = compiled(Modes)
    with pytest.raises(RuntimeError, match="call train"):
        run(optimizer, 1)
    optimizer.train()
    run(optimizer, 1)
    assert not bookkeeping(optimizer).as_written


def test_names_of_states_that_begin_alike_are_told_apart() -> None:
    class Moments(Written):
        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            m = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(g, 0.1)
            v = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(g * g, 0.1)
            p.sub_(torch.linalg.qr(m)[0] / (v.sqrt() + 1), alpha=group["lr"])

    optimizer, _ = compiled(Moments, "split433", ((8, 8),))
    run(optimizer, 2)
    lines = [line.split() for line in collage_neuron.explain(optimizer).splitlines()]
    found = {words[0]: words[1:4] for words in lines if words and words[0].startswith("exp_avg")}
    assert found == {name: ["bf16+int16", "4", "bytes"] for name in ("exp_avg", "exp_avg_sq")}


def test_what_setstate_is_not_given_stays() -> None:
    """`{"state": defaultdict(dict)}` is an idiom by which moments are forgotten."""
    params = parameters(torch.bfloat16)
    optimizer = collage_neuron.compile(SGD(params, lr=0.1, momentum=0.9), strategy="fp32", verbose=False)
    plain = SGD(parameters(torch.float32), lr=0.1, momentum=0.9)
    for each in (optimizer, plain):
        run(each, 2)
        each.__setstate__({"state": defaultdict(dict)})
        run(each, 2, first=2)
        each.__setstate__({"defaults": each.defaults})
        run(each, 2, first=4)
    assert error(values(optimizer, params), [p.detach() for p in plain.param_groups[0]["params"]]) < 2**-20
