"""Optimizers and loops that were written to make steps wrong: each is beside plain torch in fp32."""

from __future__ import annotations

from functools import partial
from typing import Any

import case_arena
import cases_of_classes
import cases_of_loops  # noqa: F401  # its cases are in `case_arena.CASES`
import pytest
import torch
from torch.nn import Parameter
from traced_cases import COMPUTED, LAUNCHED, Stepping, error, initial, left, set_gradients
from traced_updates import stepped_beside

import collage_neuron
from collage_neuron.errors import RunsAsWritten

STEPS = 6


def run(update: Any, strategy: str | None) -> tuple[Any, list[torch.Tensor]]:
    """The optimizer after some steps, and the values of the parameters."""
    return stepped_beside(partial(Stepping, update=update), initial(torch.float32), strategy, STEPS)


@pytest.mark.parametrize("name", [*LAUNCHED, *COMPUTED])
def test_an_update_is_right(name: str) -> None:
    """Its values, and what it leaves on the host; and it is launched, or runs as written."""
    update = (LAUNCHED | COMPUTED)[name]
    optimizer, found = run(update, "fp32")
    plain, exact = run(update, None)
    traces = optimizer._collage_bookkeeping.traces
    assert error(found, exact) < 1e-5
    assert left(optimizer) == left(plain)
    is_launched = traces.misses == 0 and bool(traces.kinds)
    assert is_launched == (name in LAUNCHED and name not in ASKS), traces.why


@pytest.mark.sampled(of=4)
@pytest.mark.filterwarnings("ignore::collage_neuron.ImpreciseState")
@pytest.mark.parametrize("name", LAUNCHED)
def test_an_update_whose_states_are_codes_is_launched_too(name: str) -> None:
    optimizer, _ = run(LAUNCHED[name], "split422")
    traces = optimizer._collage_bookkeeping.traces
    assert name in ASKS or (traces.misses == 0 and traces.kinds), traces.why


ASKS = {"rate_by_class", "rate_by_class_later"}
"""Rates that depend on exact classes, which placeholders do not have: such steps are not traced."""


# --- loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(of=2)
@pytest.mark.filterwarnings("ignore::collage_neuron.ImpreciseState")
@pytest.mark.parametrize("strategy", ["fp32", "plus"])
@pytest.mark.parametrize("name", case_arena.CASES)
def test_a_loop_is_right(name: str, strategy: str) -> None:
    outcome = case_arena.play(case_arena.CASES[name], strategy)
    assert outcome.error < case_arena.TOLERANCES[strategy], outcome
    (plain, plain_notes), (ours, notes) = outcome.left
    assert ours == plain
    assert notes == plain_notes


def replaces_its_state(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s["m"] = 0.9 * s.get("m", torch.zeros_like(p)) + g
    p.sub_(s["m"], alpha=lr)


def test_a_state_that_other_code_holds_has_its_value_when_it_is_replaced() -> None:
    """One more reference than ours is enough: nothing of the optimizer knows of it."""
    held: list[list[torch.Tensor]] = []
    for strategy in (None, "fp32"):
        params = initial(torch.float32 if strategy is None else torch.bfloat16)
        optimizer: Any = Stepping(params, replaces_its_state)
        if strategy:
            optimizer = collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
        for t in range(1, 4):
            set_gradients(params, t)
            if t == 3:
                state = optimizer.state[params[0]]["m"]
            optimizer.step()
        held.append([state, optimizer.state[params[0]]["m"]])
    for x, y in zip(*held, strict=True):
        assert torch.allclose(x, y, rtol=1e-6)


# --- what the tables do not have --------------------------------------------------------------------------------------


def by_the_size_of_a_result(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr * (g * 2).numel())


def by_class(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr * (1.0 if type(p) is Parameter else 7.0))


def reverse(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].reverse()


def exchange(optimizer: Any) -> None:
    optimizer.update = by_class


class Other(torch.Tensor):
    """What waits cannot have such a class."""


def make_of_another_class(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad, optimizer.state[p]["m"] = p.grad.as_subclass(Other), torch.zeros_like(p).as_subclass(Other)


@pytest.mark.parametrize("change", [reverse, exchange, make_of_another_class])
def test_a_change_between_steps(change: Any) -> None:
    """Parameters change places and have their own shapes; a function that is new asks for exact classes."""

    def steps(params: list[Any], optimizer: Any) -> None:
        for t in range(1, STEPS + 1):
            set_gradients(params, t)
            if t == 3:
                change(optimizer)
            optimizer.step()

    params, exact = initial(torch.bfloat16), initial(torch.float32)
    optimizer = Stepping(params, by_the_size_of_a_result)
    steps(params, collage_neuron.compile(optimizer, strategy="fp32", verbose=False))
    steps(exact, Stepping(exact, by_the_size_of_a_result))
    found = [collage_neuron.exact_value(optimizer, p) for p in params]
    assert error(found, [p.detach() for p in exact]) < 1e-5


def test_it_is_said_why_parameters_of_another_class_are_not_traced() -> None:
    world = case_arena.World("plus")
    with pytest.warns(RunsAsWritten, match=r": step\(\), or a function that it uses, asks for exact types"):
        case_arena.CASES["ByExactClass"](world)
    world.optimizer = case_arena.Ball([cases_of_classes.ByExactClass.Own(torch.ones(3))])
    world.params = world.optimizer.param_groups[0]["params"]
    world.compile(world.optimizer)
    with pytest.warns(RunsAsWritten, match=r"the values of a Own of torch.bfloat16 on cpu cannot wait"):
        world.step(1)
