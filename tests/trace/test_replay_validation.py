"""Traced steps are compared with their own calls: what is wrong is found where it is due, and what is right passes."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import foreign
import pytest
import torch
from traced_cases import LAUNCHED, RATED, Stepping, initial, set_gradients
from wrong_rules import BUGS, Spelled, error_of

import collage_neuron
from collage_neuron import TranslationError
from collage_neuron.passes import pipeline
from collage_neuron.passes.backends.reference import Reference, ReferenceUpdate
from collage_neuron.passes.rewrite.rules import RULES
from collage_neuron.trace import step_kinds
from collage_neuron.validation import validate

aten = torch.ops.aten

pytestmark = [pytest.mark.usefixtures("traced"), pytest.mark.validated]


def optimizer_of(make: Any, strategy: str = "plus", **settings: Any) -> Any:
    """A compiled optimizer of the parameters of a case, whose steps are traced."""
    return collage_neuron.compile(make(initial(torch.bfloat16)), strategy=strategy, verbose=False, **settings)


def step(optimizer: Any, t: int) -> None:
    set_gradients(optimizer.param_groups[0]["params"], t)
    optimizer.step()
    traces = optimizer._collage_bookkeeping.traces
    if "seen in another shape" in traces.why:
        pytest.skip("no backend has blocks of such a parameter: the step is computed")
    assert traces.misses == 0, traces.why


def snapshot(optimizer: Any) -> str:
    """All that a step may change."""
    torch.set_printoptions(profile="full")
    attributes = {k: v for k, v in vars(optimizer).items() if not k.startswith("_")}
    return str(copy.deepcopy(attributes))


def steps_until_found(optimizer: Any, last: int = 8) -> int:
    """The number of the first step that raises, which changes nothing; 0 if there is none."""
    for t in range(1, last + 1):
        set_gradients(optimizer.param_groups[0]["params"], t)
        before = snapshot(optimizer)
        found = error_of(optimizer)
        if found:
            assert re.match(rf"step {t} \(since .* nothing was updated", found)
            assert snapshot(optimizer) == before
            return t
    return 0


# --- what it must find ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize("bug", BUGS)
def test_a_wrong_rule_is_found(bug: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, wrong, make = BUGS[bug]
    monkeypatch.setattr(pipeline, "_updates", {})
    optimizer = optimizer_of(make, strategy)
    monkeypatch.setattr(pipeline, "_updates", {})
    monkeypatch.setitem(RULES, target, wrong)
    assert steps_until_found(optimizer) in ((1, 2) if "sign" in bug else (1,))


def backend_that_changes(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None]) -> None:
    """The reference backend changes what it writes, given that and the numbers of the step."""

    class Wrong(ReferenceUpdate):
        def __call__(self, components: Any, scalars: Any, values: Any = None) -> Any:
            results = list(super().__call__(components, scalars, values))
            change(results, scalars)
            return results

    monkeypatch.setattr(Reference, "lowered", lambda self, update: Wrong(update))


def with_a_growing_rate(s: Any, p: Any, g: Any) -> None:
    s["t"] = s.get("t", 0) + 1
    p.add_(g, alpha=-0.01 * s["t"])


@pytest.mark.parametrize("wrong_from", [1, 2, 3, 5])
def test_what_is_wrong_of_some_numbers_is_found_when_due(wrong_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(results: Any, scalars: Any) -> None:
        if any(abs(float(x)) > 0.01 * wrong_from - 0.005 for x in scalars):
            results[0].mul_(1.0625)

    backend_that_changes(monkeypatch, change)
    optimizer = optimizer_of(partial(Spelled, update=with_a_growing_rate), backend="reference")
    assert steps_until_found(optimizer) == {1: 1, 2: 2, 3: 4, 5: 8}[wrong_from]


def test_numbers_of_another_operation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = step_kinds._getter
    monkeypatch.setattr(step_kinds, "_getter", lambda numbers: right(list(reversed(numbers))))
    assert steps_until_found(optimizer_of(torch.optim.AdamW)) == 1


class Lists(torch.optim.Optimizer):
    """Gradients times what a function makes of the norms of all of them, in one tensor."""

    def __init__(self, params: Any, function: Callable[[Any], Any]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        grads: Any = [p.grad for p in params]
        rates = self.function(torch.stack(torch._foreach_norm(grads))).unbind()
        torch._foreach_add_(params, torch._foreach_mul(grads, rates), alpha=-0.01)


def test_after_the_error_the_same_step_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, right = (optimizer_of(torch.optim.AdamW, backend="reference") for _ in range(2))
    for t in (1, 2, 3):
        step(optimizer, t)
        step(right, t)
    with monkeypatch.context() as patch:
        backend_that_changes(patch, lambda results, scalars: results[0].add_(1))
        patch.setattr(pipeline, "_updates", {})
        set_gradients(optimizer.param_groups[0]["params"], 4)
        optimizer.param_groups[0]["collage_strategy"] = "split433"  # another update, and another wrong one
        with pytest.raises(TranslationError, match=r"step 4 .* of AdamW was not taken"):
            optimizer.step()
    optimizer.param_groups[0]["collage_strategy"] = "plus"
    for t in (4, 5):
        step(optimizer, t)
        step(right, t)
    assert snapshot(optimizer) == snapshot(right)


# --- what it must let pass --------------------------------------------------------------------------------------------


def lists(params: Any) -> Any:
    return Lists(params, lambda sizes: sizes.clamp(max=10.0) / (sizes + 1.0))


RIGHT: dict[str, Any] = {
    "schedule_free": foreign.ScheduleFreeAdamW,
    "lamb": foreign.Lamb,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "fused_amsgrad": partial(torch.optim.Adam, fused=True, amsgrad=True, weight_decay=0.1, maximize=True),
    "lists": lists,
    **{name: partial(Stepping, update=update) for name, update in LAUNCHED.items() if name not in RATED},
}


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "is_due", lambda steps: True)


@pytest.mark.sampled(of=16, each=False)  # in `test_hostile` each is validated in its first steps
@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32", "stochastic", "split312"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_at_every_step(name: str, strategy: str, every_step: None) -> None:
    optimizer = optimizer_of(RIGHT[name], strategy)
    for t in range(1, 7):
        step(optimizer, t)
    history = validate.history_of(optimizer)
    assert (history.steps, history.not_covered) == (6, 0)
    assert history.compared >= 2 * history.left_out


def test_memory_that_nobody_has_written_says_nothing(every_step: None) -> None:
    optimizer = optimizer_of(RIGHT["into_another"])
    torch.use_deterministic_algorithms(True)  # it is full of NaN then
    try:
        step(optimizer, 1)
    finally:
        torch.use_deterministic_algorithms(False)
    history = validate.history_of(optimizer)
    assert history.compared > history.left_out == 0


# --- when it runs, and what it costs ----------------------------------------------------------------------------------


def test_it_runs_at_powers_of_two_and_for_new_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(validate, "validate_job", lambda *arguments: seen.append(arguments[-1]))
    optimizer = optimizer_of(partial(Stepping, update=LAUNCHED["a_state_comes_late"]))
    for t in range(1, 13):
        step(optimizer, t)
    assert seen == [1, 2, 4, 5, 6, 8]  # steps 5 and 6 are new


def test_on_xla_values_are_drawn(every_step: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("torch_xla").device()
    params = initial(torch.bfloat16, device)
    optimizer = collage_neuron.compile(foreign.ScheduleFreeAdamW(params), strategy="plus", verbose=False)
    for t in (1, 2, 3):
        step(optimizer, t)
    history = validate.history_of(optimizer)
    assert history.compared >= 2 * 3 * 200
    assert history.not_covered == 0
    right = RULES[aten.sqrt.default]
    monkeypatch.setitem(RULES, aten.sqrt.default, lambda a, x: right(a, x) * (1 + 2**-6))
    monkeypatch.setattr(pipeline, "_updates", {})
    other = collage_neuron.compile(foreign.ScheduleFreeAdamW(initial(torch.bfloat16, device)), verbose=False)
    with pytest.raises(TranslationError, match="a parameter with drawn values"):
        step(other, 1)


def by_strides(o: Any, p: Any, g: torch.Tensor, s: Any, lr: float, t: int) -> None:
    p.sub_(g.as_strided(g.shape, g.stride()), alpha=lr)


def test_what_goes_by_strides_is_not_looked_at_in_a_sample_with_others(every_step: None) -> None:
    p = torch.nn.Parameter(torch.ones(3, 4).t().bfloat16())
    optimizer = collage_neuron.compile(Stepping([p], by_strides), strategy="fp32", verbose=False)
    for t in range(3):
        p.grad = torch.arange(12.0).reshape(3, 4).t().bfloat16() + t
        optimizer.step()
