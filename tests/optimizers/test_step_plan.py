"""A step that finds what an earlier one found computes numbers only; whatever else changes, it is planned again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, AdamW, NAdam, RMSprop

import collage_neuron
from collage_neuron.optimizer import compiled_step
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.runtime import step_plan
from collage_neuron.states import step_inventory

MAKES: dict[str, Callable[..., Any]] = {
    "AdamW": partial(AdamW, lr=0.01),
    "Adagrad": partial(Adagrad, lr=0.01, lr_decay=0.1),
    "NAdam": partial(NAdam, lr=0.01, weight_decay=0.1),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.9),
    "SGD": partial(SGD, lr=0.01, momentum=0.9),
}
SHAPES = ((5,), (2, 3), (4, 4), (1,))
FIRST, STEPS = 9, 13
"""The step before which something changes: the two before were steady; and how many are taken."""

Change = Callable[[Any, int], None]


def trained(make: Callable[..., Any], change: Change, **settings: Any) -> list[torch.Tensor]:
    """Parameters and states after the steps, of two groups; each step is preceded by `change`."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=draws).bfloat16()) for shape in SHAPES]
    optimizer = make([{"params": params[:3]}, {"params": params[3:], "lr": 0.02}])
    collage_neuron.compile(optimizer, **{"strategy": "plus", "verbose": False, **settings})
    for t in range(1, STEPS + 1):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws).bfloat16()
        change(optimizer, t)
        optimizer.step()
    found = [x for p in params for x in (p.detach(), *map(torch.as_tensor, optimizer.state[p].values()))]
    return [x.clone() for x in found]


def at(t: int, does: Callable[[Any], Any]) -> Change:
    """What `does` before step `t`."""
    return lambda optimizer, now: does(optimizer) if now == t else None


def group(optimizer: Any, **settings: Any) -> None:
    optimizer.param_groups[0].update(settings)


def first(optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """A parameter and its state."""
    p = optimizer.param_groups[0]["params"][1]
    return p, optimizer.state[p]


def halve_states(optimizer: Any) -> None:
    for x in first(optimizer)[1].values():
        if isinstance(x, torch.Tensor) and x.dim() and x.is_floating_point():
            x.mul_(0.5)


def exchange_states(optimizer: Any) -> None:
    state = first(optimizer)[1]
    state.update({k: x.clone() for k, x in state.items() if isinstance(x, torch.Tensor)})


def count(optimizer: Any) -> None:
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += 100


def count_one(optimizer: Any) -> None:
    if "step" in first(optimizer)[1]:
        first(optimizer)[1]["step"] += 7


def reload(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def drop_gradient(optimizer: Any) -> None:
    first(optimizer)[0].grad = None


def freeze(optimizer: Any) -> None:
    first(optimizer)[0].requires_grad_(False).grad = None


def narrow_list(optimizer: Any) -> None:
    """Settings as lists, as configuration files have them, which change in place."""
    for each in optimizer.param_groups:
        if "betas" in each:
            each["betas"] = each["betas"] if isinstance(each["betas"], list) else list(each["betas"])
            each["betas"][0] *= 0.99


def widen_gradient(optimizer: Any) -> None:
    p, _ = first(optimizer)
    p.grad, p.grad.data = torch.zeros_like(p), p.grad.float()


def transpose_gradient(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][2]
    p.grad = p.grad.t()


def share_gradient(optimizer: Any) -> None:
    a, b = (optimizer.param_groups[0]["params"][i] for i in (0, 1))
    b.grad = a.grad.new_ones(1).expand(b.shape)


def exchange_data(optimizer: Any) -> None:
    p, _ = first(optimizer)
    p.data = p.data.clone() + 1


def widen_state(optimizer: Any, in_place: bool) -> None:
    state = first(optimizer)[1]
    for name, x in [(k, x) for k, x in state.items() if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16]:
        if name.endswith("_lo"):
            continue
        if in_place:
            x.data = x.data.float()
        else:
            state[name] = x.float()


def exchange_count(optimizer: Any) -> None:
    state = first(optimizer)[1]
    if "step" in state:
        state["step"] = torch.tensor(9.0, dtype=torch.float64)


def transpose_weights(optimizer: Any) -> None:
    p = optimizer.param_groups[0]["params"][2]
    p.data = p.data.t().contiguous().t()


def clear(optimizer: Any) -> None:
    if not isinstance(optimizer, Adagrad):  # which makes states in its constructor only
        optimizer.state.clear()


def add_group(optimizer: Any) -> None:
    if isinstance(optimizer, Adagrad):
        return
    p = Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer.add_param_group({"params": [p]})


def share(optimizer: Any) -> None:
    """Gives a parameter a gradient in the memory of that of another one."""
    p, q = optimizer.param_groups[0]["params"][:3:2]
    q.grad = p.grad.flatten()[:1].expand(q.shape)


def exchange_groups(optimizer: Any) -> None:
    optimizer.param_groups[:] = [dict(group) for group in reversed(optimizer.param_groups)]


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what changes is said; tests of it are elsewhere

CHANGES: dict[str, Change] = {
    "nothing": at(0, print),
    "rate": at(FIRST, partial(group, lr=0.5)),
    "rate, in each step": lambda optimizer, t: group(optimizer, lr=0.1 / t),
    "rate of a whole number": at(FIRST, partial(group, lr=1)),
    "rate as a tensor": at(FIRST, partial(group, lr=torch.tensor(0.3))),
    "rates of NumPy's": lambda optimizer, t: group(optimizer, lr=np.float64(0.1) / t),
    "settings of the user's": lambda optimizer, t: group(optimizer, mine=[lambda: t], lr=0.1 / t),
    "lists": lambda optimizer, _: narrow_list(optimizer),
    "no rate": at(FIRST, partial(group, lr=0.0)),
    "decay": at(FIRST, partial(group, weight_decay=0.3)),
    "decay near 1": at(FIRST, partial(group, weight_decay=95.0)),
    "maximize": at(FIRST, partial(group, maximize=True)),
    "strategy": at(FIRST, partial(group, collage_strategy="full")),
    "strategy and back": lambda optimizer, t: group(optimizer, collage_strategy="bf16" if t == FIRST else "plus"),
    "backend": at(FIRST, partial(group, collage_backend="reference")),
    "skip": at(FIRST, partial(group, collage_nonfinite="skip")),
    "states written": at(FIRST, halve_states),
    "states exchanged": at(FIRST, exchange_states),
    "states widened": at(FIRST, partial(widen_state, in_place=False)),
    "states widened in place": at(FIRST, partial(widen_state, in_place=True)),
    "states cleared": at(FIRST, clear),
    "counts": at(FIRST, count),
    "one count": at(FIRST, count_one),
    "another count": at(FIRST, exchange_count),
    "loaded": at(FIRST, reload),
    "a gradient less": at(FIRST, drop_gradient),
    "a gradient less, twice": lambda optimizer, t: drop_gradient(optimizer) if t in (FIRST, FIRST + 2) else None,
    "frozen": at(FIRST, freeze),
    "fp32 gradient": at(FIRST, widen_gradient),
    "transposed gradient": at(FIRST, transpose_gradient),
    "expanded gradient": at(FIRST, share_gradient),
    "weights exchanged": at(FIRST, exchange_data),
    "weights transposed": at(FIRST, transpose_weights),
    "a gradient in the memory of another": at(FIRST, share),
    "group added": at(FIRST, add_group),
    "groups exchanged": at(FIRST, exchange_groups),
}


@pytest.mark.sampled(of=10)  # each change with one class: what notices it does not know the class
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize("name", MAKES)
def test_native_steps_are_those_of_the_reference_that_are_planned_anew(
    name: str, strategy: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = partial(trained, MAKES[name], CHANGES[change], strategy=strategy, validate="off")
    found = step(backend="native")
    monkeypatch.setattr(step_plan, "again", lambda *_: None)
    monkeypatch.setattr(step_inventory, "look", lambda *_: None)
    expected = step(backend="reference")
    assert len(found) == len(expected)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_rates_that_change_no_format_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []

    def counted(*args: Any) -> Any:
        planned.append(args[3])
        return step_plan.plan(*args)

    monkeypatch.setattr(compiled_step, "plan", counted)

    def schedule(optimizer: Any, t: int) -> None:
        if t == FIRST:
            planned.clear()
        for i, own in enumerate(optimizer.param_groups):
            own["lr"] = 0.01 * 0.8 ** (t + i)

    trained(MAKES["AdamW"], schedule, strategy="split433", validate="off")
    assert planned == []


@pytest.mark.parametrize("rate", [1e39, -1e39, float("inf"), float("nan")])
def test_a_rate_that_is_no_fp32_number_is_rejected(rate: float) -> None:
    with pytest.raises(ValueError, match="set a finite learning rate"):
        trained(MAKES["SGD"], at(FIRST, partial(group, lr=rate)))


class Momentum(torch.optim.Optimizer):
    """A class whose steps are traced."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=0.1)


@pytest.mark.parametrize("make", [AdamW, lambda params: Momentum(params, {})])
def test_a_parameter_that_is_taken_out_of_its_group_costs_no_launch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value stays; the others go on together, without it."""
    launched, run = list[list[int]](), NATIVE.run

    def noted(launches: Any) -> Any:
        launched.append([len(x.reads) for x in launches])
        return run(launches)

    monkeypatch.setattr(NATIVE, "run", noted)
    params = [Parameter(torch.randn(4, 3)) for _ in range(5)]
    optimizer = collage_neuron.compile(make(params), backend="native", validate="off", verbose=False)
    for t in range(8):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        if t == 3:
            value = collage_neuron.exact_value(optimizer, params[1])
            gone = optimizer.param_groups[0]["params"].pop(1)
    assert launched[-8:] == [[5]] * 4 + [[4]] * 4  # the first ones of a process are those of the rounding probe
    optimizer.param_groups[0]["params"].append(gone)
    assert torch.equal(collage_neuron.exact_value(optimizer, gone), value)
