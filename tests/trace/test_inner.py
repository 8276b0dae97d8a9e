"""An optimizer that steps another one is compiled with it: its states are in words too, and its operations wait."""

from __future__ import annotations

import copy
import gc
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import cases_of_inner as cases
import pytest
import torch
from cases_of_inner import CASES, LAUNCHED, NEAR, adam, compiled, error, initial, plain, run, sgd
from torch.nn import Parameter
from torch.optim import AdamW

import collage_neuron
from collage_neuron import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")


@pytest.mark.parametrize("strategy", NEAR)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_plain_torch(name: str, strategy: str) -> None:
    optimizer, params = compiled(CASES[name], strategy)
    other, exact = plain(CASES[name])
    run(name, other, exact, 10)
    run(name, optimizer, params, 10)
    assert error(optimizer, params, exact) < NEAR[strategy]
    traces = bookkeeping(optimizer).traces
    assert (traces.misses == 0 and bool(traces.kinds)) == (name in LAUNCHED), traces.why


class Making(torch.optim.Optimizer):
    """Makes the optimizer that it steps in its first step, and another one now and then."""

    every = 5

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.taken, self.inner = 0, cast("Any", None)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.taken % self.every == 0:
            self.inner = AdamW(self.param_groups, lr=0.01)
        self.taken += 1
        self.inner.step()


@pytest.mark.parametrize("strategy", NEAR)
def test_an_optimizer_that_a_step_makes_is_one_inside(strategy: str) -> None:
    optimizer, params = compiled(Making, strategy)
    other, exact = plain(Making)
    run("", other, exact, 10)
    run("", optimizer, params, 10)
    assert error(optimizer, params, exact) < NEAR[strategy]


def test_the_states_of_the_inner_one_are_in_words_between_steps() -> None:
    optimizer, params = compiled(CASES["lookahead"], "plus")
    run("lookahead", optimizer, params, 2)
    state = optimizer.state[params[0]]
    inner = {k: x.dtype for k, x in state.items() if k.startswith("optimizer__exp")}
    assert inner == dict.fromkeys(
        ("optimizer__exp_avg", "optimizer__exp_avg_sq", "optimizer__exp_avg_sq_lo"), torch.bfloat16
    )
    assert not any(optimizer.optimizer.state.values())
    assert "optimizer__exp_avg_sq bf16x2" in str(collage_neuron.explain(optimizer))


def test_one_that_has_stepped_is_compiled_with_its_states() -> None:
    inner, params = plain(adam)
    other, exact = plain(adam)
    run("", inner, params, 3)
    run("", other, exact, 3)
    optimizer = collage_neuron.compile(cases.Timm(inner), strategy="fp32", verbose=False)
    outer = cases.Timm(other)
    run("", optimizer, params, 7, 3)
    run("", outer, exact, 7, 3)
    assert error(optimizer, params, exact) < 1e-5


# --- what is around a step ----------------------------------------------------------------------------------------


def test_methods_of_the_outer_one_see_exact_values() -> None:
    optimizer, params = compiled(CASES["schedule-free"], "split433")
    other, exact = plain(CASES["schedule-free"])
    for number in range(4):
        for o, ps in ((optimizer, params), (other, exact)):
            run("", o, ps, 2, 2 * number)
            o.eval()
        assert error(optimizer, params, exact) < NEAR["split433"]
        for o in (optimizer, other):
            o.train()
        assert error(optimizer, params, exact) < NEAR["split433"]


@pytest.mark.parametrize("name", ["lookahead", "sam"])
def test_the_class_is_compiled_before_there_is_an_object(name: str) -> None:
    import pytorch_optimizer

    def made(cls: Any) -> Any:
        params = [Parameter(p.detach().bfloat16()) for p in initial()]
        return (cls(adam(params), k=3) if name == "lookahead" else cls(params, AdamW, lr=cases.LR)), params

    cls = pytorch_optimizer.Lookahead if name == "lookahead" else pytorch_optimizer.SAM
    optimizer, params = made(collage_neuron.compile(cls, strategy="plus"))
    run(name, optimizer, params, 5)
    params_of = initial()
    with torch.no_grad():
        for p in params_of:
            p.copy_(p.bfloat16())
    of_object = collage_neuron.compile(CASES[name](params_of), strategy="plus", verbose=False)
    run(name, of_object, params_of, 5)
    assert all(torch.equal(p, q) for p, q in zip(params, params_of, strict=True))


def test_another_strategy_later() -> None:
    optimizer, params = compiled(CASES["lookahead"])
    other, exact = plain(CASES["lookahead"])
    run("", other, exact, 8)
    run("", optimizer, params, 4)
    with pytest.warns(collage_neuron.StrategyChanged, match="optimizer__exp_avg in bf16"):
        collage_neuron.compile(optimizer, strategy="split433", verbose=False)
    run("", optimizer, params, 4, 4)
    assert error(optimizer, params, exact) < NEAR["split433"]
    assert bookkeeping(optimizer).formats[params[0]]["optimizer__exp_avg"] == "bf16+int8"


# --- what is rejected ---------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Any], Any]] = {
    "step": lambda inner: inner.step(),
    "state_dict": lambda inner: inner.state_dict(),
    "load_state_dict": lambda inner: inner.load_state_dict(adam(initial()).state_dict()),
}


@pytest.mark.parametrize("name", ["lookahead", "ortho"])
@pytest.mark.parametrize("use", USES)
def test_an_optimizer_inside_a_compiled_one_cannot_be_used_by_itself(name: str, use: str) -> None:
    optimizer, params = compiled(CASES[name], "plus")
    run("", optimizer, params, 2)
    before = [p.detach().clone() for p in params]
    with pytest.raises(
        UnsupportedUpdate, match=r"this AdamW is inside this Collage\w+, which was compiled and has its"
    ):
        USES[use](optimizer.optimizer)
    assert all(map(torch.equal, params, before))
    run("", optimizer, params, 1)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clears": lambda inner, p: inner.state.clear(),
    "removes one": lambda inner, p: inner.state.pop(p),
    "writes one": lambda inner, p: inner.state[p].update(exp_avg=torch.zeros_like(p)),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_is_written_to_the_inner_state_between_steps_is_rejected(what: str) -> None:
    optimizer, params = compiled(CASES["lookahead"], "plus")
    run("", optimizer, params, 2)
    before = [p.detach().clone() for p in params]
    WRITES[what](optimizer.optimizer, params[0])
    with pytest.raises(UnsupportedUpdate, match="the state of the AdamW inside this CollageLookahead was written, or"):
        run("", optimizer, params, 1, 2)
    assert all(map(torch.equal, params, before))


def test_a_group_that_is_added_later() -> None:
    optimizer, params = compiled(lambda ps: CASES["lookahead"](ps[:2]))
    other, exact = plain(lambda ps: CASES["lookahead"](ps[:2]))
    late = [p.detach().bfloat16() for p in exact[2:]]
    params[2:], exact[2:] = [Parameter(x.clone()) for x in late], [Parameter(x.float()) for x in late]
    for o, ps in ((optimizer, params), (other, exact)):
        run("", o, ps, 4)
        o.add_param_group({"params": ps[2:]})
        run("", o, ps, 4, 4)
    assert error(optimizer, params, exact) < 1e-5


def test_its_outer_one_must_stay() -> None:
    params = initial()
    inner = adam(params)
    run("", collage_neuron.compile(cases.Timm(inner), verbose=False), params, 2)
    gc.collect()
    with pytest.raises(UnsupportedUpdate, match="this AdamW is inside an optimizer that is gone"):
        inner.step()
    with pytest.raises(UnsupportedUpdate, match="its AdamW is inside another optimizer, which was compiled"):
        collage_neuron.compile(cases.Timm(inner))


def over_more(params: list[Parameter]) -> Any:
    made = cases.Listed(adam(params[:2]))
    made.many.append(sgd(params))
    return made


class Anew(cases.Listed):
    """Joins the states of those that it steps."""

    @property
    def state(self) -> Any:
        return {p: x for each in self.many for p, x in each.state.items()}

    @state.setter
    def state(self, _: Any) -> None:
        """Of the constructor."""


class Named(cases.Listed):
    """Has a state of its own that is called as one of the inner one is."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["many_0__exp_avg"] = p.clone()


class Alone(torch.optim.Optimizer):
    """Has a constructor that neither calls torch's nor makes what that makes, and steps no other optimizer."""

    def __init__(self, params: list[Parameter]) -> None:
        self.state, self.defaults, self.param_groups = defaultdict(dict), {}, [{"params": params}]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


WRONG: dict[cases.Make, str] = {
    Alone: "its constructor does not call that of torch.optim.Optimizer",
    lambda params: cases.Listed(
        collage_neuron.compile(adam(params), verbose=False)
    ): "Listed steps an optimizer that is compiled already: compile the outermost one alone",
    over_more: "it steps a SGD over parameters that are in none of its own groups",
    lambda ps: Anew(adam(ps)): "its `state` is made anew each time it is asked for",
}


@pytest.mark.parametrize("make", WRONG)
def test_what_cannot_be_compiled_with_its_inner_one_is_rejected(make: cases.Make) -> None:
    params = initial()
    optimizer = make(params)
    with pytest.raises(UnsupportedUpdate, match=WRONG[make]):
        collage_neuron.compile(optimizer)


def test_a_state_that_is_called_as_an_inner_one_is_rejected_and_nothing_changed() -> None:
    optimizer, params = compiled(lambda ps: Named(adam(ps)), "plus")
    before = [p.detach().clone() for p in params]
    with pytest.raises(UnsupportedUpdate, match=r"has a state called 'many_0__exp_avg'.*; rename it"):
        run("", optimizer, params, 1)
    assert all(map(torch.equal, params, before))


def test_a_step_from_before_compiling_is_rejected() -> None:
    params = initial()
    optimizer = CASES["lookahead"](params)
    step = optimizer.step
    collage_neuron.compile(optimizer, verbose=False)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedUpdate, match=r"this Lookahead.step\(\) is from before compiling, and steps another"):
        step()
    assert all(map(torch.equal, params, before))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_without_its_inner_one_is_rejected(copied: Callable[[Any], Any]) -> None:
    optimizer, _ = compiled(CASES["sam"])
    with pytest.raises(UnsupportedUpdate, match=r"SAM.__getstate__\(\) leaves out the optimizer inside"):
        copied(optimizer)


class Copied(cases.Anchored):
    """Can be copied."""

    def __getstate__(self) -> Any:
        return {**super().__getstate__(), "kept": self.kept}


def test_a_copy_with_its_inner_one_goes_its_own_way() -> None:
    optimizer, params = compiled(lambda ps: Copied(adam(ps)), "plus")
    run("", optimizer, params, 2)
    other, others = copy.deepcopy((optimizer, params))
    run("", optimizer, params, 2, 2)
    run("", other, others, 2, 2)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert other.kept["an inner one"] is not optimizer.kept["an inner one"]
    with pytest.raises(UnsupportedUpdate, match="this AdamW is inside this CollageCopied"):
        other.kept["an inner one"].step()
