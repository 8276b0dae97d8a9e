"""Only a first moment, whose errors stay small on their way, has the coarsest format of a `split` strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from idioms import Following, gradient, start
from planned import plan
from torch import Tensor
from torch_cases import CASES

import collage_neuron
from collage_neuron.passes.analysis.state_roles import roles_of
from collage_neuron.runtime.step_plan import Job
from collage_neuron.states.inner_optimizers import base_of

pytestmark = pytest.mark.usefixtures("rejecting")

State = dict[str, Tensor]


def job_of(optimizer: Any) -> Job:
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    return job


def roles(optimizer: Any) -> dict[str, str]:
    recording = job_of(optimizer).recording
    return dict(roles_of(recording.captured, recording.slots, recording.following))


def compiled(make: Callable[..., Any], strategy: Any = "split311") -> tuple[torch.nn.Parameter, Any]:
    p = torch.nn.Parameter(start())
    p.grad = gradient(0)
    return p, collage_neuron.compile(make([p]), strategy=strategy, backend="reference")


ADAM = {"exp_avg": "average", "exp_avg_sq": "slow"}
PLAIN = {"square_avg": "slow"}
CENTERED = {"square_avg": "signed"}  # what is left of it, beside the square of the mean, may be small
OF_TORCH: dict[str, dict[str, str]] = {
    "adadelta": {"square_avg": "slow", "acc_delta": "slow"},
    "adagrad": {"sum": "sum"},
    "adam": ADAM,
    "adam_amsgrad": ADAM | {"max_exp_avg_sq": "maximum"},
    "adam_l2": ADAM,
    "adamax": {"exp_avg": "average", "exp_inf": "slow"},
    "adamw": ADAM,
    "asgd": {"ax": "signed"},
    "nadam": ADAM,
    "radam": ADAM,
    "rmsprop": PLAIN,
    "rmsprop_centered": CENTERED,
    "rmsprop_momentum": PLAIN | {"momentum_buffer": "average"},
    "rmsprop_options": CENTERED | {"momentum_buffer": "average"},
    "rprop": {},
    "sgd": {},
    "sgd_momentum": {"momentum_buffer": "average"},
    "sgd_nesterov": {"momentum_buffer": "average"},
}
"""The roles of the states of torch's optimizers; what is not named has the format of the parameter."""


@pytest.mark.parametrize("name", OF_TORCH)
def test_roles_of_the_states_of_torch(name: str) -> None:
    """In the first step, which creates the states, and in later ones."""
    p, optimizer = compiled(lambda ps: CASES[name].of(ps[0]))
    for step in range(3):
        p.grad = gradient(step)
        assert roles(optimizer) == OF_TORCH[name]
        optimizer.step()


def own(update: Callable[[State, Tensor, float], Tensor], *names: str) -> Callable[..., Following]:
    return partial(Following, idiom=lambda s, g, b, p: update(s, g, b), names=names, beta=0.9)


def average(s: State, g: Tensor, b: float) -> Tensor:
    return s["m"].lerp_(g, 1 - b)


def running_maximum(s: State, g: Tensor, b: float) -> Tensor:
    s["x"].copy_(torch.where(g.abs() > s["x"], g.abs(), s["x"]))
    return g / (s["x"] + 1e-3)


def gain(s: State, g: Tensor, b: float) -> Tensor:
    average(s, g, b)
    s["x"].copy_((s["x"] + 1e-8) * torch.where(g * s["m"] > 0, 1.05, 0.95))
    return g * s["x"]


def logarithm(s: State, g: Tensor, b: float) -> Tensor:
    s["x"].copy_((b * s["x"].exp() + (1 - b) * (g * g + 1e-8)).log())
    return g / s["x"].mul(0.5).exp()


def ratchet(s: State, g: Tensor, b: float) -> Tensor:
    m = s["x"] * b + g * (1 - b)
    return s["x"].copy_(torch.where(m > s["x"], m, s["x"]))


def kept_maximum(s: State, g: Tensor, b: float) -> Tensor:
    s["t"].copy_(torch.maximum(s["t"], s["x"].lerp_(g, 1 - b)))
    return g * s["t"]


def belief(s: State, g: Tensor, b: float) -> Tensor:
    s["x"].lerp_(g, 1 - b)
    s["v"].mul_(b).add_((g - s["x"]) * (g - s["x"]), alpha=1 - b)
    return s["x"] / (s["v"].sqrt() + 1e-3)


def by_momentum_of_momentum(s: State, g: Tensor, b: float) -> Tensor:
    s["x"].lerp_(g, 1 - b)
    s["n"].lerp_(s["x"], 1 - b)
    return g / (s["n"].square() + 1e-3)


def before(s: State, g: Tensor, b: float) -> Tensor:
    changed = g - s["x"]
    s["x"].copy_(g)
    return changed


OWN: dict[str, Callable[..., Following]] = {
    "running maximum": own(running_maximum, "x"),
    "gain": own(gain, "m", "x"),
    "logarithm": own(logarithm, "x"),
    "maximum of an average": own(ratchet, "x"),
    "average behind a maximum": own(kept_maximum, "x", "t"),
    "belief": own(belief, "x", "v"),
    "behind another average": own(by_momentum_of_momentum, "x", "n"),
    "sum": own(lambda s, g, b: s["x"].add_(g), "x"),
    "growing": own(lambda s, g, b: s["x"].mul_(2 - b).add_(g), "x"),
    "gradient of before": own(before, "x"),
    "root": own(lambda s, g, b: s["x"].lerp_(g, 1 - b).abs().sqrt() * g, "x"),
    "square": own(lambda s, g, b: s["x"].lerp_(g, 1 - b).abs() * s["x"], "x"),
    "exponential": own(lambda s, g, b: g * s["x"].lerp_(g, 1 - b).exp(), "x"),
    "divided by": own(lambda s, g, b: g / (s["x"].lerp_(g, 1 - b) + 9), "x"),
}
"""Updates whose state `x` is no first moment; `m` is one."""


@pytest.mark.parametrize("name", OWN)
def test_a_state_that_is_no_first_moment_has_the_format_of_the_parameter(name: str) -> None:
    p, optimizer = compiled(OWN[name])
    for step in range(2):
        p.grad = gradient(step)
        formats = {state: fmt.name for state, fmt in job_of(optimizer).update.formats.items()}
        assert formats["x"] == "bf16+int8"
        assert formats.get("m", "i8q8") == "i8q8"
        optimizer.step()
    assert p.isfinite().all()


# --- errors and checkpoints -----------------------------------------------------------------------------------------


def wide_gradients(steps: int, mean: float, drop: int = 99999) -> Any:
    g = torch.Generator().manual_seed(5)
    sizes = torch.exp2(-4 * torch.rand(16, 128, generator=g))
    for step in range(steps):
        noise = torch.randn(16, 128, generator=g) + mean
        yield (sizes * noise * (1 if step < drop else 0.1)).bfloat16()


def against_float64(make: Callable[..., Any], strategy: str, gradients: Callable[[], Any]) -> tuple[float, Any, Any]:
    """The error of the parameter as a fraction of its way, and a state dict of both."""
    p, exact = torch.nn.Parameter(torch.zeros(16, 128)), torch.nn.Parameter(torch.zeros(16, 128).double())
    p.data = p.data.bfloat16()
    ours, theirs = collage_neuron.compile(make([p]), strategy=strategy), make([exact])
    for g in gradients():
        p.grad, exact.grad = g, g.double()
        ours.step(), theirs.step()
    error = (collage_neuron.exact_value(ours, p).double() - exact.detach()).norm() / exact.detach().norm()
    return float(error), ours.state_dict()["state"][0], theirs.state_dict()["state"][0]


@pytest.mark.parametrize("mean", [1.0, 5.0])
@pytest.mark.parametrize("strategy", ["split312", "split311"])
def test_a_variance_does_not_become_negative(strategy: str, mean: float) -> None:
    """The mean of the gradients is as large as their noise: with 8-bit codes most weights became NaN."""
    make = partial(torch.optim.RMSprop, lr=1e-3, centered=True)
    error, _, _ = against_float64(make, strategy, lambda: wide_gradients(150, mean))
    assert error < 5e-2


@pytest.mark.parametrize("strategy", ["split422", "split312"])
def test_a_maximum_does_not_grow_by_roundings(strategy: str) -> None:
    make = partial(torch.optim.AdamW, lr=1e-3, amsgrad=True)
    _, ours, theirs = against_float64(make, strategy, lambda: wide_gradients(200, 0.2, drop=50))
    ratio = ours["max_exp_avg_sq"].double() / theirs["max_exp_avg_sq"]
    assert (ratio.log2().abs() < 0.03).all()
