"""A traced step of a whole copy says what a recording says before the first step, and changes nothing."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch_cases import CASES
from traced_cases import Stepping, initial, set_gradients

import collage_neuron
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.trace import dry_run
from collage_neuron.trace.recorded_classes import TRACE

CAPTURABLE = "If capturable=True"
"""torch's own steps assert a device that takes graphs; a recording puts the switch aside."""

TORCH_DIFFERS = {
    **dict.fromkeys([name for name, case in CASES.items() if case.options.get("capturable")], CAPTURABLE),
    "radam_foreach": "",  # foreach code computes the root in another place, so that no second moment is recognised
}
"""Cases that differ, and what is said then: recordings have the loop over single tensors."""

MAKES: dict[str, Any] = {
    name: lambda params, case=case: case.base(params, **case.options) for name, case in CASES.items()
}


def fp32() -> list[Parameter]:
    return [Parameter(p.detach().float()) for p in initial(torch.bfloat16)]


def compiled(make: Any, **settings: Any) -> Any:
    return collage_neuron.compile(make(fp32()), verbose=False, **settings)


@pytest.mark.sampled(of=6, each=False)  # most are options of a few classes
@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize("name", MAKES)
def test_explain_says_the_same(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for switch in ("off", "on"):
        monkeypatch.setenv(TRACE, switch)
        told.append(collage_neuron.explain(compiled(MAKES[name], strategy=strategy)))
    recorded, traced = told
    if name in TORCH_DIFFERS:
        assert TORCH_DIFFERS[name] in traced
    if "as written" not in recorded:
        assert (traced == recorded) == (name not in TORCH_DIFFERS)


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("update", "why"),
    [
        (lambda o, p, g, s, lr, t: p.sub_(g, alpha=lr * float(g.norm())), "reads a value"),
        (lambda o, p, g, s, lr, t: p.sub_(torch.from_numpy(g.numpy()), alpha=lr), "memory is read"),
        (lambda o, p, g, s, lr, t: p.sub_(g * next(o.rates)), "generator"),
        (lambda o, p, g, s, lr, t: o.large.add_(1) and p.sub_(g), r"a tensor of shape \[5000\] is neither"),
        (lambda o, p, g, s, lr, t: LARGE.add_(1) and p.sub_(g), r"writes to a tensor of shape \[5000\]"),
        (lambda o, p, g, s, lr, t: p.sub_(g * o.nothing), "raises AttributeError"),
    ],
)
def test_a_reason_is_given_and_nothing_is_done(update: Any, why: str) -> None:
    def make(params: Any) -> Any:
        optimizer: Any = Stepping(params, update)
        optimizer.rates, optimizer.large = (x / 10 for x in range(9)), LARGE
        return optimizer

    params = fp32()
    before, optimizer = [p.detach().clone() for p in params], make(params)
    with pytest.raises(collage_neuron.UnsupportedUpdate, match=why):
        dry_run.run(Stepping, optimizer).record(optimizer.param_groups[0], params[0])
    assert all(map(torch.equal, params, before))
    assert LARGE.unique().tolist() == [0.0]


LARGE: torch.Tensor = torch.zeros(5000)


# --- what it leaves alone ---------------------------------------------------------------------------------------------


class Rate:
    """An object that counts."""

    value = 0.1

    def next(self) -> float:
        self.value *= 0.5
        return self.value


class Counts(torch.optim.Optimizer):
    """Changes all that it holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "counts": [0]})
        self.rate, self.numbers, self.calls, self.special = Rate(), itertools.count(1), {"n": 0}, {id(params[0])}
        self.total, self.favourites = torch.zeros(()), [params[0]]
        for p in params:
            self.state[p] = {"m": torch.zeros_like(p), "step": torch.tensor(0.0)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls["n"] += 1
        self.total.add_(1)
        self.last = "set"
        for group in self.param_groups:
            group["counts"][0] += 1
            for p in group["params"]:
                self.state[p]["step"] += 1
                self.state[p]["n"] = next(self.numbers)
                self.state[p]["m"].mul_(0.9).add_(p.grad)
                many = 2.0 if any(p is q for q in self.favourites) else 1.0
                p.sub_(self.state[p]["m"], alpha=many * group["lr"] * self.rate.next())


def all_of(optimizer: Any) -> str:
    own = {k: v for k, v in sorted(vars(optimizer).items()) if not k.startswith("_") and k != "rate"}
    return str((copy.deepcopy(own), vars(optimizer.rate)))


@pytest.mark.usefixtures("traced")
def test_the_optimizer_stays_as_it_is() -> None:
    optimizer = Counts(params := initial(torch.bfloat16))
    set_gradients(params, 1)
    objects = [p.grad for p in params] + [x for state in optimizer.state.values() for x in state.values()]
    before = all_of(optimizer)
    known = dry_run.run(Counts, optimizer)
    assert [known.record(optimizer.param_groups[0], p).captured.states for p in params] == [("m",)] * 3
    assert all_of(optimizer) == before
    now = [p.grad for p in params] + [x for state in optimizer.state.values() for x in state.values()]
    assert all(map(lambda x, y: x is y, objects, now))


@pytest.mark.usefixtures("traced")
def test_a_compiled_one_too() -> None:
    optimizer = compiled(torch.optim.AdamW)
    set_gradients(params := optimizer.param_groups[0]["params"], 1)
    optimizer.step()
    before = str(copy.deepcopy(optimizer.state_dict())), str(params)
    dry_run.run(base_of(type(optimizer)), optimizer)
    assert (str(copy.deepcopy(optimizer.state_dict())), str(params)) == before


def test_it_needs_no_memory() -> None:
    p = Parameter(torch.empty((2**15, 2**14), device="meta"))
    known = dry_run.run(torch.optim.AdamW, torch.optim.AdamW([p]))
    assert known.record({"params": [p]}, p).captured.states == ("exp_avg", "exp_avg_sq")
