"""Other people's optimizers, as they are: each is near its own float64 run, or refused by name."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import foreign
import pytest
import torch
from agreement import Agreement, Make, Twins, compare, gradients, initial
from as_written import Written
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")


class ChannelMeans(Written):
    """A second moment of means over all dimensions but the first, one for each channel of a convolution."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["channel"] = p.new_zeros(p.shape[0], 1, 1)
        state["channel"].lerp_(g.square().mean((1, 2), keepdim=True), 0.1)
        p.sub_(group["lr"] * g * state["channel"].rsqrt())


class Elsewhere(Optimizer):
    """Momentum that is not in `state[p]`: in an attribute, in the group, under a key of its own, or in a list."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, {"lr": 1e-2, "buffers": {}})
        self.where, self.buffers = where, dict[Any, Any]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                places: dict[str, tuple[Any, Any]] = {
                    "attribute": (self.buffers, p),
                    "group": (group["buffers"], p),
                    "global": (self.state["global"], "momentum"),  # type: ignore[index]  # as some do
                    "list": (self.state[p], "history"),
                    "name": (self.state[p], "grad"),
                }
                place, key = places[self.where]
                if key not in place:
                    place[key] = [torch.zeros_like(p)] if self.where == "list" else torch.zeros_like(p)
                momentum = place[key][0] if self.where == "list" else place[key]
                momentum.mul_(0.9).add_(p.grad)
                p.add_(momentum, alpha=-group["lr"])


class Counting(Optimizer):
    """Keeps its schedule in attributes: a flag, a list and a dictionary of numbers, a 0-d tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.warm, self.rates, self.counts, self.total = False, [0.0], {"steps": 0}, torch.tensor(0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.counts["steps"] += 1
        self.total += 0.5
        self.rates.append(1.0 / self.counts["steps"])
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * sum(self.rates) * (1.0 if self.warm else 0.1))
                p.mul_(1 - 1e-3 * float(self.total))
        self.warm = True


class Case(NamedTuple):
    """An optimizer, how many update graphs it has, and which of its states a person would say accumulate."""

    make: Make
    graphs: int
    squares: set[str]
    others: set[str]
    sums: set[str] | frozenset[str] = frozenset()
    """Running sums without decay that are no squares: copies of the parameter, which need what it needs."""


CASES = {
    "transformers_adamw": Case(foreign.TransformersAdamW, 2, {"exp_avg_sq"}, {"exp_avg"}),
    "sophia": Case(foreign.Sophia, 3, {"hessian"}, {"exp_avg"}),  # with a new curvature, without, and the first
    "schedule_free": Case(foreign.ScheduleFreeAdamW, 2, {"exp_avg_sq"}, set(), {"z"}),
}

FARTHEST = {"fp32": 0.005, "bf16": 0.1}
"""The error at the median element is below this fraction of the distance moved, which is small: eight steps of 1e-3."""


@cache
def compared(name: str, strategy: str, arithmetic: str = "fp32") -> Agreement:
    """The agreement of a case, which several tests look at."""
    return compare(CASES[name].make, strategy, arithmetic)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["full", "plus"])
def test_it_is_near_its_float64_run(name: str, strategy: str, arithmetic: str) -> None:
    case, found = CASES[name], compared(name, strategy, arithmetic)
    assert found.states == case.squares | case.others | case.sums
    assert set().union(*found.formats.values()) == {"bf16x2"} or strategy == "plus"
    assert found.error < FARTHEST[arithmetic]


def test_a_parameter_of_one_word_is_divided_in_the_papers_arithmetic() -> None:
    """Most of each update is lost, and nothing beyond it."""
    adan = pytest.importorskip("adan_pytorch").Adan
    assert compare(adan, "bf16", "bf16").error <= 1.0


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("name", CASES)
def test_plus_on_xla_is_as_near(xla: torch.device, name: str) -> None:
    assert compare(CASES[name].make, "plus", "fp32", xla, steps=6).error < FARTHEST["fp32"]


@pytest.mark.parametrize("name", CASES)
def test_the_states_that_plus_expands_are_those_a_person_would_name(name: str) -> None:
    """In every step; and a run has two or three graphs, so that no later step compiles again."""
    found = compared(name, "plus")
    assert len(found.graphs) == CASES[name].graphs <= 3
    assert found.squares == CASES[name].squares
    assert found.sums == CASES[name].sums
    expanded = {state for state, formats in found.formats.items() if formats == {"bf16x2"}}
    assert expanded == CASES[name].squares | CASES[name].sums | {"param"}
    assert all(found.formats[state] == {"bf16"} for state in CASES[name].others)


def test_what_draws_is_refused_by_name_and_left_as_it_was() -> None:
    p = torch.nn.Parameter(initial().float())
    optimizer = foreign.Langevin([p])
    with pytest.raises(UnsupportedUpdate, match=r"aten\.randn_like\.default cannot wait \(at .*foreign\.py"):
        collage_neuron.compile(optimizer)
    assert type(optimizer) is foreign.Langevin
    assert p.dtype == torch.float32


def test_means_over_the_first_of_three_dimensions_are_refused_by_name() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 3, 2))
    with pytest.raises(
        UnsupportedUpdate, match=r"not elementwise: aten\.mean\.dim turns .* \[4, 3, 2\] into \[4, 1, 1\]"
    ):
        collage_neuron.compile(ChannelMeans([p]))


@pytest.mark.parametrize("where", ["attribute", "group", "global", "list", "name"])
def test_momentum_kept_where_nobody_would_carry_it_is_refused(where: str) -> None:
    """A launch does not write it; compiling leaves nothing there."""
    optimizer = Elsewhere([torch.nn.Parameter(initial())], where)
    with pytest.raises(
        UnsupportedUpdate, match=r"keep each in optimizer\.state\[p\]|or another state|something else has; rename it"
    ):
        collage_neuron.compile(optimizer)
    assert not optimizer.buffers, "a copy's step left something behind"
    assert not optimizer.param_groups[0]["buffers"]


def test_a_schedule_in_attributes_is_run_once_a_step() -> None:
    twins = Twins(Counting, "full", "fp32", "cpu")
    for gradient in gradients(5):
        twins.step(gradient)
        collage_neuron.explain(twins.compiled)  # records once more
        for name in ("warm", "rates", "counts", "total"):
            assert getattr(twins.compiled, name) == getattr(twins.exact, name)
