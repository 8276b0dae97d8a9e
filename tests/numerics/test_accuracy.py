"""The goals of benchmarks/accuracy/goals.py, most in shorter runs, on a seed and a mixture not used for tuning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from accuracy import contenders
from accuracy.conditions import CONDITIONS, REPORTED, TUNING, Stream
from accuracy.exact import Exact, exact
from accuracy.goals import GOALS, LARGE_STEPS, Goal
from oracles import one_thread
from torch import Tensor

from collage_neuron import STRATEGIES

SEED = (200,)
STEPS = 300
SHORTER = (CONDITIONS["recipe"].steps / STEPS) ** 0.5
"""Roundings that are independent add up as the square root of the steps, and the distance travelled as the steps: in a
shorter run they are a larger part of it, by at most this factor."""
ALIKE = ("recipe", "t2", "rows", "mixture")
"""Conditions with the same hyper-parameters: one run has the gradients of all."""


class Stacked(Stream):
    """The streams of ALIKE, one after the other along the first dimension."""

    def __init__(self) -> None:
        super().__init__(CONDITIONS["recipe"], SEED)
        self.streams = [Stream(CONDITIONS[name], SEED) for name in ALIKE]
        self.start = torch.cat([stream.start for stream in self.streams])

    def gradients(self, steps: int) -> Iterator[Tensor]:
        for parts in zip(*(stream.gradients(steps) for stream in self.streams), strict=True):
            yield torch.cat(parts)


def stream_of(condition: str) -> Stream:
    return Stacked() if condition in ALIKE else Stream(CONDITIONS[condition], SEED)


@cache
def exact_run(condition: str, steps: int) -> Exact:
    return exact(stream_of(condition), steps)


@cache
@one_thread()
def errors(strategy: str, condition: str, steps: int) -> list[float]:
    """The error of the condition, or of all of ALIKE."""
    (contender,) = (c for c in contenders.own() if c.name == strategy)
    return exact_run(condition, steps).errors(contenders.run(contender, stream_of(condition), steps).theta)


def known(goal: Goal) -> bool:
    return goal.strategy in STRATEGIES


@pytest.mark.slow
@pytest.mark.parametrize("goal", [g for g in GOALS if known(g) and "recipe" in g.conditions], ids=lambda g: g.strategy)
def test_the_goal_of_each_byte_count_is_met_at_large_steps(goal: Goal) -> None:
    found = dict(zip(ALIKE, errors(goal.strategy, "recipe", STEPS), strict=True))
    found[".9999"] = errors(goal.strategy, ".9999", STEPS)[0]
    assert {name: error for name, error in found.items() if error > goal.bound * SHORTER} == {}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sorted({g.strategy for g in GOALS if known(g) and "1e-6" in g.conditions}))
def test_the_goal_at_a_small_learning_rate_is_met(strategy: str) -> None:
    """In a whole run: the error of the weights' low word fades only as the distance grows."""
    bound = min(g.bound for g in GOALS if g.strategy == strategy and "1e-6" in g.conditions)
    assert errors(strategy, "1e-6", CONDITIONS["1e-6"].steps)[0] <= bound


def test_plain_words_miss_every_goal() -> None:
    """So the bounds can fail."""
    assert min(errors("bf16", "recipe", 30)) > max(goal.bound for goal in GOALS)


def test_no_seed_of_the_goals_was_used_for_tuning() -> None:
    assert not {*SEED, *REPORTED} & set(TUNING)
    assert set(LARGE_STEPS) | {"1e-6", "mixture"} <= CONDITIONS.keys()


def test_the_strategies_of_the_goals_have_the_bytes_that_they_are_named_for() -> None:
    for goal in GOALS:
        assert sum(map(int, goal.strategy.removeprefix("split"))) == goal.bytes
