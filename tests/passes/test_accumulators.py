"""Slow accumulators are found however they are written, and nothing else is; what is not understood is warned of."""

from __future__ import annotations

import copy
import re
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from as_written import Written
from idioms import AVERAGES, FAST, OTHERS, Dividing, Following, Idiom, error, gradient, start, stepped
from planned import plan
from sampling import part
from torch import Tensor

import collage_neuron
from collage_neuron.passes.analysis.state_roles import roles_of, structure
from collage_neuron.passes.ir.update import Recording
from collage_neuron.states.inner_optimizers import base_of

SLOW = {name: (idiom, ("v",), {"v"}) for name, idiom in AVERAGES.items()} | OTHERS


def compiled(make: Any) -> tuple[torch.nn.Parameter, Any]:
    """Under `plus`; of what is understood nothing is warned, which would be an error here."""
    p = torch.nn.Parameter(start())
    return p, collage_neuron.compile(make([p]), strategy="plus", validate="off")


def recorded(optimizer: Any) -> Recording:
    """The step to come."""
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    return job.recording


def found(make: Any) -> set[frozenset[str]]:
    """What is said to be slow, in the first steps."""
    p, optimizer = compiled(make)
    kinds = set()
    for step in range(3):
        p.grad = gradient(step)
        kinds.add(structure(recorded(optimizer).captured.graph).slow)
        optimizer.step()
    return kinds


KNOWN = {name: (partial(Dividing, idiom=idiom, names=zeros), slow) for name, (idiom, zeros, slow) in SLOW.items()} | {
    name: (partial(Following, idiom=idiom, names=zeros, beta=0.9), slow) for name, (idiom, zeros, slow) in FAST.items()
}
NOT_SHOWN = {"addcdiv"}
"""Second moments that are not shown not to be negative: they have a wider format, with signs."""
NO_AVERAGES = {
    "with a mask", "centered", "largest second moment, by where", "of g * sign(m)",
}  # fmt: skip
"""Where no first moment is recognised: a mask that depends on the state may make a maximum of it, and what does not
change its sign with the gradient and the parameter may be a second moment."""


@pytest.mark.parametrize("name", KNOWN)
def test_a_state_is_recognised_however_it_is_written(name: str) -> None:
    """What accumulates slowly; what is said not to be negative, which never is; and first moments."""
    make, slow = KNOWN[name]
    p, optimizer = compiled(make)
    roles: dict[str, str] = {}
    for step in range(8):
        p.grad = gradient(step)
        if step < 3:
            recording = recorded(optimizer)
            assert structure(recording.captured.graph).slow == slow
            roles = dict(roles_of(recording.captured, recording.slots, recording.following))
        optimizer.step()
        assert all((optimizer.state[p][s] >= 0).all() for s, role in roles.items() if role in ("slow", "sum"))
        if name in AVERAGES:
            assert ("signed" in roles.values()) == (name in NOT_SHOWN)
    if name in FAST:
        zeros = set(FAST[name][1])
        averages = {state for state, role in roles.items() if role == "average"}
        assert averages == (set() if name in NO_AVERAGES else {"m", "n", "d"} & zeros)


class Averaging(Written):
    """Schedule-free, whose z decays: what the parameter is moved to by a `lerp` in each step, as in its first."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(z=p.clone(), m=torch.zeros_like(p))
        state["m"].lerp_(g, 0.1)
        state["z"].mul_(1 - 1e-4).sub_(state["m"], alpha=group["lr"])
        p.lerp_(state["z"], 0.5)


def test_what_the_parameter_is_moved_to_is_kept_as_the_parameter_is() -> None:
    assert found(Averaging) == {frozenset({"z"})}


@pytest.mark.parametrize("name", part(SLOW, 8))  # one path once a state is found; all are found above
def test_plus_follows_float64_as_closely_as_its_format_allows(name: str) -> None:
    """Where steps shrink, and roundings of the parameter count for more, `full` is no better.

    In `light` the same runs are 2e-2 or more off, which is what a state costs that `plus` misses.
    """
    idiom, zeros, _ = SLOW[name]
    make = partial(Dividing, idiom=idiom, names=zeros)
    found = error(make, "plus")
    assert found <= 2e-3 or found <= 2 * error(make, "full")


def test_an_update_of_many_operations_is_analysed_in_little_time() -> None:
    """An operand may be reached on exponentially many ways."""

    def deep(s: dict[str, Any], g: Tensor, b: float, p: Tensor) -> Tensor:
        for _ in range(30):
            s["v"] = (s["v"] * b + g * g * (1 - b)) * (1 + 1e-3 * s["v"].abs())
        return s["v"]  # type: ignore[no-any-return]

    begun = time.process_time()
    assert found(partial(Dividing, idiom=deep)) == {frozenset({"v"})}
    assert time.process_time() - begun < 20


# What is not understood, and divided by.


def _positive_part(s: dict[str, Any], g: Tensor, b: float, p: Tensor) -> Tensor:
    s["half"].lerp_(g.clamp(min=0), 1 - b)
    return s["half"].sqrt()  # type: ignore[no-any-return]


def _agreement(s: dict[str, Any], g: Tensor, b: float, p: Tensor) -> Tensor:
    s["half"].mul_(b).add_(g * s["before"], alpha=1 - b)
    s["before"].copy_(g)
    return (s["half"].clamp(min=0) / (1 - b)).add_(1e-6).rsqrt().reciprocal()  # type: ignore[no-any-return]


UNKNOWN: dict[str, tuple[Idiom, tuple[str, ...]]] = {
    "positive part": (_positive_part, ("half",)),
    "product with the last gradient": (_agreement, ("half", "before")),
}


def warned(make: Any, strategy: Any, steps: int = 3) -> list[str]:
    p = torch.nn.Parameter(start())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", collage_neuron.SmallSteps)  # of a decay, which some idioms have
        stepped(collage_neuron.compile(make([p]), strategy=strategy), p, steps)
    assert all(w.category is collage_neuron.ImpreciseState for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_state_that_is_not_understood_and_divided_by_is_warned_of_once(name: str) -> None:
    make = partial(Dividing, idiom=UNKNOWN[name][0], names=UNKNOWN[name][1])
    (message,) = warned(make, "plus")
    assert re.match(
        r"Dividing: strategy='plus' keeps state\[p\]\['half'\] in bf16, and the update divides by it or takes its root"
        r".*Use strategy='full', or strategy=\{'param': 'bf16x2', 'half': 'bf16x2'\}",
        message,
    )
    assert warned(make, {"param": "bf16x2", "half": "bf16x2"}) == []


@pytest.mark.parametrize("strategy", ["bf16", "light", "full", "fp32", "fp32_states", "stochastic", {"*": "bf16"}])
def test_whoever_asked_for_one_word_or_has_two_is_not_warned(strategy: Any) -> None:
    assert warned(partial(Dividing, idiom=_positive_part, names=("half",)), strategy) == []


@pytest.mark.parametrize("fmt", ["i16q8", "i8q8"])
def test_codes_with_a_zero_are_warned_of_where_the_update_divides_by_them(fmt: str) -> None:
    """Its second moments, in the second row of a block, are 0 in such codes: a step was as long as lr / eps * m."""
    (message,) = warned(torch.optim.AdamW, {"param": "bf16x2", "exp_avg": fmt, "exp_avg_sq": fmt})
    assert message.startswith(
        f"AdamW: the strategy keeps state[p]['exp_avg_sq'] in {fmt}, and the update divides by it"
    )
    assert warned(torch.optim.AdamW, {"param": "bf16x2", "exp_avg": fmt, "exp_avg_sq": "u8q16"}) == []
    assert (
        warned(partial(torch.optim.SGD, lr=0.1, momentum=0.9), {"param": "bf16x2", "*": "bf16", "momentum_buffer": fmt})
        == []
    )


def test_the_warning_is_an_error_before_anything_changes() -> None:
    p = torch.nn.Parameter(start().float())
    optimizer = Dividing([p], _positive_part, ("half",))
    with pytest.raises(collage_neuron.ImpreciseState, match=r"keeps state\[p\]\['half'\] in bf16"):
        collage_neuron.compile(optimizer, strategy="plus")
    assert type(optimizer) is Dividing
    assert p.dtype == torch.float32


class Half(Dividing):
    """Copies of an optimizer have the attributes of its class alone."""

    idiom = staticmethod(_positive_part)
    names = ("half",)

    def __init__(self, params: Any) -> None:
        super().__init__(params, _positive_part, ("half",))


def test_a_copy_of_the_optimizer_does_not_warn_again() -> None:
    p = torch.nn.Parameter(start())
    with pytest.warns(collage_neuron.ImpreciseState):
        optimizer = collage_neuron.compile(Half([p]), strategy="plus")
    (q,) = (again := copy.deepcopy(optimizer)).param_groups[0]["params"]
    stepped(again, q, 2)


def test_explain_says_what_is_slow_what_is_divided_by_and_what_is_imprecise() -> None:
    p = torch.nn.Parameter(start())
    with pytest.warns(collage_neuron.ImpreciseState):
        optimizer = collage_neuron.compile(Dividing([p], _positive_part, ("half",)), strategy="plus")
    text = collage_neuron.explain(optimizer)
    assert "under a root or a division: half\n" in text
    assert "of these not recognised, and imprecise in one word: half\n" in text
    text = collage_neuron.explain(collage_neuron.compile(torch.optim.AdamW([torch.nn.Parameter(start())])))
    assert "accumulate slowly: exp_avg_sq\nunder a root or a division: exp_avg_sq\nAdamW: " in text
