"""States of steps as written: positions are kept as the parameter is, averages in fewer bytes where they show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.eager.moment_detection import averages
from collage_neuron.states.bookkeeping import bookkeeping

SHAPE, STEPS, RATE = (64, 128), 200, 1e-6


class Lookahead(Optimizer):
    """Sign momentum; every fifth step the weights go half of the way back to slow ones. It reads what is launched."""

    def __init__(self, params: Any, lr: float = RATE, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["slow"], state["m"], state["v"] = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - group["beta"])
                state["v"].mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])
                if not p.grad.isfinite().all().item():
                    continue
                p.sub_(state["m"].sign(), alpha=group["lr"])
                if group["steps"] % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def train(p: Any, optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        p.grad = (numbers(1) + numbers(i + 2)).bfloat16().to(p.dtype)
        optimizer.step()


def lookahead(start: torch.Tensor, strategy: str = "split433") -> tuple[Any, Optimizer]:
    p = Parameter(start.clone())
    return p, collage_neuron.compile(Lookahead([p]), strategy=strategy)


@pytest.mark.parametrize(("strategy", "size"), [("split433", 0.07), ("split423", 0.3)])
def test_slow_weights_are_as_accurate_as_in_fp32_at_small_rates(strategy: str, size: float) -> None:
    start = size * numbers(0)
    exact, plain = Parameter(start.double()), Parameter(start.clone())
    for p in exact, plain:
        train(p, Lookahead([p]), range(STEPS))
    p, optimizer = lookahead(start, strategy)
    train(p, optimizer, range(STEPS))
    off, wanted = (
        (x.double() - exact.detach()).norm().item() for x in (collage_neuron.exact_value(optimizer, p), plain.detach())
    )
    assert off < 1.1 * wanted


def test_averages_have_three_bytes_in_a_resumed_run_too() -> None:
    p, optimizer = lookahead(numbers(0))
    train(p, optimizer, range(3))
    q, resumed = lookahead(p.detach())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for of, its in (p, optimizer), (q, resumed):
        train(of, its, range(3, 6))
        text = collage_neuron.explain(its)
        low = {k: x.dtype for k, x in its.state[of].items() if k.endswith("_lo")}
        assert low == {"param_lo": torch.int16, "slow_lo": torch.int16, "m_lo": torch.int8, "v_lo": torch.int8}, text
        assert collage_neuron.bytes_per_parameter(its) == 2 + 4 + 4 + 3 + 3
    assert all(torch.equal(x, resumed.state[q][k]) for k, x in optimizer.state[p].items())


P, G = numbers(0), numbers(1)


@pytest.mark.parametrize(
    ("first", "is_average"),
    [
        (0.1 * G, True),
        (0.1 * G * G, True),
        (G, False),  # a sum, or a momentum: of a sum no error is forgotten
        ((1 - 1e-6) * G, False),  # eps is no beta
        (0.02 * G, False),  # a sum of steps at a rate of .02, although another beta is .98
        (P, False),
        (0.1 * P, False),  # an average of the weights
        (torch.zeros(SHAPE), False),
    ],
)
def test_what_is_not_evident_is_no_average(first: torch.Tensor, is_average: bool) -> None:
    group = {"lr": 0.02, "betas": (0.9, 0.98), "eps": 1e-6}
    assert averages(group, P, G, {"m": first}) == ({"m"} if is_average else set())


def test_an_average_and_that_of_the_squares_show_each_other() -> None:
    """Of a gradient that was clipped, or that the step has added a decay to; a third state beside them is nothing."""
    group, scaled = {"lr": 0.001, "betas": (0.9, 0.999)}, 0.3 * (G + 0.1 * P)
    states = {"m": 0.1 * scaled, "v": 0.001 * scaled * scaled, "slow": P, "sum": scaled}
    assert averages(group, P, G, states) == {"m", "v"}
    assert not averages(group, P, G, {"m": states["m"], "slow": P})


class Counting(Optimizer):
    """Counts from step `since` on how often gradients were positive, by 61: soon beyond the whole numbers of bf16.

    It runs as written: numpy reads the memory of a gradient.
    """

    def __init__(self, params: Any, since: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.since, self.taken = since, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for p in self.param_groups[0]["params"]:
            n = self.state[p].setdefault("n", torch.zeros_like(p))
            if self.taken >= self.since:
                n.add_((p.grad > 0).float(), alpha=61)
            p.sub_(p.grad * float(p.grad.numpy().any()), alpha=0.1)


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("strategy", ["split433", "plus", "bf16", {"*": "bf16+int16"}])
def test_counts_are_exact(strategy: Any, since: int) -> None:
    torch.manual_seed(0)
    p, grads = Parameter(torch.randn(40, 3).bfloat16()), torch.randn(40, 40, 3).bfloat16()
    optimizer = collage_neuron.compile(Counting([p], since), strategy=strategy)
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    assert torch.equal(optimizer.state[p]["n"], 61.0 * (grads[since - 1 :] > 0).sum(0))
    assert bookkeeping(optimizer).formats[p]["n"] == "fp32"


def test_a_count_that_a_strategy_names_is_kept_as_it_says() -> None:
    p = Parameter(torch.randn(4, 3).bfloat16())
    optimizer = collage_neuron.compile(Counting([p], 1), strategy={"n": "bf16", "*": "bf16x2"})
    p.grad = torch.randn_like(p)
    optimizer.step()
    assert bookkeeping(optimizer).formats[p]["n"] == "bf16"
