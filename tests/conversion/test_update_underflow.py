"""`SmallSteps` speaks for each format where its law says that steps or decay are lost, and the law is true of it.

Warnings are errors here. Where they are expected, what is lost is measured on both sides of the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import mlp, step_with
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import collage_neuron
from collage_neuron import ImpreciseState, SmallSteps
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES
from collage_neuron.numerics.underflow import LOST, Scale, digits, is_short, lost

pytestmark = pytest.mark.filterwarnings("error::collage_neuron.SmallSteps")

SHORT = [name for name, s in STRATEGIES.items() if is_short(format_named(s.param))]


def rounding_of(strategy: str) -> float:
    return float(2.0 ** -digits(format_named(STRATEGIES[strategy].param)))


def weights(size: float, seed: int = 0) -> Tensor:
    return size * torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))


def adamw(size: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95), **settings: Any) -> AdamW:
    return AdamW([nn.Parameter(weights(size))], weight_decay=weight_decay, betas=betas, **settings)


def take(optimizer: Optimizer, steps: int = 1, scheduler: Any = None) -> None:
    for _ in range(steps):
        step_with(optimizer, lambda p: torch.full_like(p, 1e-3))
        if scheduler is not None:
            scheduler.step()


# --- the law --------------------------------------------------------------------------------------------------------


def walk(
    fmt: Format, change: Callable[[Tensor, int], Tensor], start: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The start, and the ends of the same steps with a parameter in a format and in float64."""
    p = fmt.decode(fmt.encode(start))
    first = exact = p.double()
    for t in range(steps):
        exact = exact + change(exact, t)
        p = fmt.decode(fmt.encode((p.double() + change(p.double(), t)).float()))
    return first, p.double(), exact


@pytest.mark.parametrize("name", ["bf16x2", "bf16+int8"])
@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
def test_the_law_of_steps(name: str, ratio: float) -> None:
    """AdamW with exact moments, at a constant rate, on gradients whose mean is a tenth of their noise."""
    fmt, steps, g = format_named(name), 400, torch.Generator().manual_seed(1)
    rate = ratio * 2.0 ** -digits(fmt) * 0.07
    start, mean = 0.07 * torch.randn(2048, generator=g), 0.1 * torch.randn(2048, generator=g)
    m, v, directions = torch.zeros(2048).double(), torch.zeros(2048).double(), []
    for t in range(steps):
        grad = (torch.randn(2048, generator=g) + mean).double()
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad * grad
        directions.append(m / (1 - 0.9 ** (t + 1)) / (v / (1 - 0.95 ** (t + 1))).sqrt())
    first, end, exact = walk(fmt, lambda _, t: -rate * directions[t], start, steps)
    error = ((end - exact).norm() / (exact - first).norm()).item()
    assert lost(ratio, 1.0) / 4 < error < 2 * lost(ratio, 1.0)


@pytest.mark.parametrize("name", ["bf16x2", "bf16+int8"])
@pytest.mark.parametrize("ratio", [0.1, 0.4, 1.0, 2.0, 4.0])
def test_the_law_of_decays(name: str, ratio: float) -> None:
    """The share of the decay that arrives where nothing else moves a weight."""
    fmt = format_named(name)
    decay = ratio * 2.0 ** -digits(fmt)
    start = 0.02 * torch.randn(2048, generator=torch.Generator().manual_seed(0))
    first, end, exact = walk(fmt, lambda x, _: -decay * x, start, 1000)
    arrived = (((end - first) * (exact - first)).sum() / (exact - first).square().sum()).item()
    fits = not Scale(0.0, 1.0, decay).loses_decay(fmt)
    assert (0.8 < arrived < 1.2) if fits else arrived < 0.25


def test_the_default_loses_what_fp32_loses() -> None:
    assert not is_short(format_named(STRATEGIES[DEFAULT].param))
    assert digits(format_named(STRATEGIES[DEFAULT].param)) == digits(format_named("fp32"))


# --- warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SHORT)
@pytest.mark.parametrize("size", [0.07, 1.0])
def test_it_is_said_where_steps_are_lost(strategy: str, size: float) -> None:
    """On both sides of the threshold, by a factor of two."""
    threshold = 8 * rounding_of(strategy) * size
    said = (
        rf"'{strategy}' keeps parameters as .* the learning rate is {threshold / 2:.2g}: about 0.1 of the way .* lost"
    )
    with pytest.warns(SmallSteps, match=said.replace("+", r"\+")):
        collage_neuron.compile(adamw(size, lr=threshold / 2), strategy=strategy, verbose=False)
    collage_neuron.compile(adamw(size, lr=threshold * 2), strategy=strategy, verbose=False)
    assert lost(threshold * 2, rounding_of(strategy) * size) < LOST < lost(threshold / 2, rounding_of(strategy) * size)


@pytest.mark.parametrize("strategy", SHORT)
def test_it_is_said_where_decay_is_lost(strategy: str) -> None:
    """The issue's numbers: learning rate 1e-4, weight decay .01, of parameters that are bf16 already too."""
    said = rf"'{strategy}' keeps .* cannot hold a decay of 1e-06 a step .* gradients are zero .* 'split4\d\d'"
    with pytest.warns(SmallSteps, match=said):
        collage_neuron.compile(adamw(0.02, 0.01, lr=1e-4), strategy=strategy, verbose=False)
    narrow = AdamW([nn.Parameter(weights(0.02).bfloat16())], lr=1e-4, weight_decay=0.01)
    with pytest.warns(SmallSteps, match=said):
        collage_neuron.compile(narrow, strategy=strategy, verbose=False)
    collage_neuron.compile(adamw(0.02, 0.1, lr=1e-3), strategy=strategy, verbose=False)


# --- rates of later -------------------------------------------------------------------------------------------------


def test_learning_rates_of_later_are_looked_at_once_they_stay() -> None:
    """Lowered by hand, of a group that is added, and of a compiled class; each group is warned of once."""
    optimizer = collage_neuron.compile(adamw(1.0, lr=1e-2), strategy="split322", verbose=False)
    take(optimizer, 3)
    optimizer.param_groups[0]["lr"] = 1e-6
    take(optimizer)
    with pytest.warns(SmallSteps, match=r"param_groups\[0\].*the learning rate is 1e-06"):
        take(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))], "lr": 1e-7})
    with pytest.warns(SmallSteps, match=r"param_groups\[1\].*the learning rate is 1e-07"):
        take(optimizer, 2)
    take(optimizer, 3)
    made = collage_neuron.compile(AdamW, strategy="split312", verbose=False)
    of_class = made([torch.ones(8, 64, dtype=torch.bfloat16)], lr=1e-7)
    with pytest.warns(SmallSteps, match=r"param_groups\[0\].*the learning rate is 1e-07"):
        take(of_class, 2)


SCHEDULES: dict[str, Callable[[Optimizer, int], Any]] = {
    "cosine": lambda o, steps: CosineAnnealingLR(o, steps),
    "warm-up and cosine": lambda o, n: LambdaLR(
        o, lambda t: (t + 1) / 20 if t < 20 else 0.5 * (1 + math.cos(math.pi * (t - 20) / (n - 20)))
    ),
    "in steps": lambda o, steps: StepLR(o, steps // 10, gamma=0.5),
    "constant, then to zero": lambda o, n: LambdaLR(o, lambda t: min(1.0, 5 * (1 - t / n))),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("strategy", ["plus", "split312"])
def test_a_schedule_that_falls_too_far_is_warned_of_once(name: str, strategy: str) -> None:
    """From just above the threshold, if it falls for long; from 16 times that nothing is said, however far it falls."""
    threshold = 8 * rounding_of(strategy)
    for times, warns in ((1.05, name != "constant, then to zero"), (16.0, False)):
        optimizer = adamw(1.0, lr=times * threshold)
        optimizer.param_groups[0]["params"][0].data.fill_(1.0)
        scheduler = SCHEDULES[name](optimizer, 200)
        optimizer = collage_neuron.compile(optimizer, strategy=strategy, verbose=False, validate="off")
        if warns:
            with pytest.warns(SmallSteps, match=r"the schedule has lowered the learning rate from") as all_of_them:
                take(optimizer, 200, scheduler)
            assert len(all_of_them) == 1
        else:
            take(optimizer, 200, scheduler)


# --- many optimizers, usual recipes ---------------------------------------------------------------------------------


RECIPES: dict[str, Callable[[Any], Optimizer]] = {
    "GPT-2": lambda ps: AdamW(ps, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
    "Llama": lambda ps: AdamW(ps, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
    "torch's defaults": AdamW,
    "fine-tuning": lambda ps: AdamW(ps, lr=1e-5, weight_decay=0.01),
    "small rates": lambda ps: AdamW(ps, lr=6e-7, betas=(0.9, 0.95), weight_decay=0.0),
    "SGD": lambda ps: SGD(ps, lr=1e-6, momentum=0.9, weight_decay=1e-4),
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_default_is_silent(name: str) -> None:
    model = mlp()
    optimizer = RECIPES[name](model.parameters())
    scheduler = CosineAnnealingLR(optimizer, 20)
    _, optimizer = collage_neuron.compile(model, optimizer, verbose=False)
    take(optimizer, 20, scheduler)


# --- second moments that cannot decrease ----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["light", "stochastic"])
def test_a_second_moment_that_cannot_decrease_is_warned_of(strategy: str) -> None:
    said = (
        rf"strategy='{strategy}' keeps state\[p\]\['exp_avg_sq'\] in bf16, where it cannot decrease: its decay of 0.001"
    )
    with pytest.warns(ImpreciseState, match=said):
        collage_neuron.compile(adamw(0.02, lr=1e-3, betas=(0.9, 0.999)), strategy=strategy, verbose=False)
    collage_neuron.compile(adamw(0.02, lr=1e-3, betas=(0.9, 0.99)), strategy=strategy, verbose=False)


def second_moment(strategy: str, beta2: float) -> float:
    """How many times too large the second moment is 200 steps after 20 steps of 30-fold gradients."""
    p = nn.Parameter(weights(0.02).bfloat16())
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0)
    optimizer = collage_neuron.compile(optimizer, strategy=strategy, verbose=False, validate="off")
    g, exact = torch.Generator().manual_seed(0), torch.zeros(8, 64).double()
    for t in range(300):
        grad = (1e-3 * (30 if 80 <= t < 100 else 1) * torch.randn(8, 64, generator=g)).bfloat16()
        p.grad, exact = grad, beta2 * exact + (1 - beta2) * grad.double() ** 2
        optimizer.step()
    state = optimizer.state[p]
    return float(((state["exp_avg_sq"].float() + state.get("exp_avg_sq_lo", 0.0)).double() / exact).mean())


@pytest.mark.filterwarnings("ignore:.* cannot decrease")
def test_it_is_true() -> None:
    assert second_moment("light", 0.999) > 1.15
    assert second_moment("plus", 0.999) == pytest.approx(1, abs=1e-2)
    assert second_moment("light", 0.99) == pytest.approx(1, abs=0.4)  # 2**-8 / .01, by which it may stop too early
