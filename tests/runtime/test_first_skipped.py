"""First steps that are skipped: the next one is the first, for optimizers whose first step is unlike the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import pytorch_optimizer
import schedulefree
import torch
from as_written import Written
from torch.nn import Parameter
from torch.optim import SGD, Adam, Optimizer

import collage_neuron

Make = Callable[[list[Parameter]], Optimizer]


class Follows(Written):
    """Its state begins as the parameter."""

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"] = p.clone()
        state["z"].sub_(g, alpha=group["lr"])
        p.lerp_(state["z"], 0.5)


def training(make: Any, **settings: Any) -> Make:
    """A schedule-free optimizer in training mode."""

    def made(params: list[Parameter]) -> Optimizer:
        optimizer: Optimizer = make(params, lr=1e-2, **settings)
        optimizer.train()  # type: ignore[attr-defined]
        return optimizer

    return made


MAKE: dict[str, Make] = {
    "own": Follows,
    "momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9, dampening=0.9),
    "SGDScheduleFree": training(schedulefree.SGDScheduleFree),
    "AdamWScheduleFree": training(schedulefree.AdamWScheduleFree),
    "ADOPT": lambda params: pytorch_optimizer.ADOPT(params, lr=1e-2),
    "NovoGrad": lambda params: pytorch_optimizer.NovoGrad(params, lr=1e-2),
}


def parameters(dtype: torch.dtype) -> list[Parameter]:
    return [Parameter(torch.full((n,), 0.5, dtype=dtype)) for n in (64, 3)]


def step(optimizer: Optimizer, params: list[Parameter], t: int, bad: int | None = None) -> None:
    for i, p in enumerate(params):
        p.grad = torch.full_like(p, 1.0 + t + i)
        if i == bad:
            p.grad[1] = torch.nan
    optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_the_next_step_is_the_first(name: str) -> None:
    """Bits of a run without that step; and, two of them later, near the same class in float64."""
    found = []
    for bad in (True, False):
        params = parameters(torch.float32)
        optimizer = collage_neuron.compile(MAKE[name](params), strategy="split444", verbose=False, nonfinite="skip")
        if bad:
            step(optimizer, params, 0, bad=0)
            step(optimizer, params, 0, bad=1)
        for t in range(1, 6):
            step(optimizer, params, t)
        assert collage_neuron.skipped_steps(optimizer) == 2 * bad
        found.append([collage_neuron.exact_value(optimizer, p) for p in params])
    assert all(map(torch.equal, *found))
    exact = parameters(torch.float64)
    oracle = MAKE[name](exact)
    for t in range(1, 6):
        step(oracle, exact, t)
    for x, p in zip(found[0], exact, strict=True):
        torch.testing.assert_close(x.double(), p.detach(), rtol=1e-5, atol=1e-6)


def test_a_parameter_that_begins_later() -> None:
    """The others, which had their states, are skipped too: no step count advances."""
    params = parameters(torch.float32)
    optimizer = collage_neuron.compile(Adam(params), verbose=False, nonfinite="skip")
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    step(optimizer, params, 1, bad=0)
    assert optimizer.state[params[0]]["step"] == 1
    assert "exp_avg" not in optimizer.state[params[1]]
    step(optimizer, params, 2)
    assert optimizer.state[params[1]]["step"] == 1
