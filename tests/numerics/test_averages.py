"""Averages and sums in stochastic codes move at the rate of those in float64: no error is common to a run.

A draw adds noise whose expectation is 0 whatever happened before, so the noises of a run are martingale differences:
the variance of their sum is the expectation of the sum of their squares. Errors are compared with that standard error.
Draws that depend on earlier ones, and draws between codes instead of values, have errors of many standard errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from oracles import one_thread
from torch import Tensor

import collage_neuron
from collage_neuron.numerics.block_formats import ROOTS
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.threefry import Words, halves, threefry

SHAPE = (32, 128)
SEED, CHUNK = 7, 64
STANDARD_ERRORS = 5.0
"""What a sum of many noises exceeds in either direction with a chance of 6e-7."""

Draws = Callable[[int], Iterator[Tensor]]
Gradient = Callable[[int, torch.Generator], Tensor]


@cache
def _many(chunk: int) -> Tensor:
    """Draws of `CHUNK` steps: (CHUNK, 4, *SHAPE). Faster than the graph of a step, which must give the same."""
    steps = torch.arange(CHUNK, dtype=torch.int32)[:, None] + CHUNK * chunk
    words = Words(torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32), torch.tensor(0, dtype=torch.int32))
    found = halves(threefry(Words(torch.tensor(SEED, dtype=torch.int32), steps), words))
    return torch.stack([x.expand(CHUNK, -1) for x in found], 1).reshape(CHUNK, 4, *SHAPE)


def drawn(step: int) -> Iterator[Tensor]:
    """The draws of the package for its first state."""
    return iter(_many(step // CHUNK)[step % CHUNK])


class Run(NamedTuple):
    """The error of the sum over a run of what was stored, against float64."""

    errors: float
    """In standard errors."""
    relative: float


@one_thread()
def run(fmt: Format, draws: Draws, gradient: Gradient, keep: float, add: float, steps: int, since: int = 0) -> Run:
    """Stores x = keep * x + add * gradient; from step `since` on, the errors of x are summed up.

    Elements count as fractions of their scale. Noise of step t is kept times `keep` by each later step.
    """
    g = torch.Generator().manual_seed(3)
    scale = torch.exp2(-6 * torch.arange(128.0) / 127).expand(SHAPE)
    words = fmt.encode(torch.zeros(SHAPE))
    exact = torch.zeros(SHAPE, dtype=torch.float64)
    error, total, variance = 0.0, 0.0, 0.0
    later = [sum(keep**n for n in range(max(since - t, 1), steps - t)) for t in range(steps)]
    for step in range(steps):
        new = add * gradient(step, g).expand(SHAPE) * scale
        x = fmt.decode(words) * keep + new
        exact = exact * keep + new
        left = draws(step)
        words = fmt.store("m", x, lambda left=left: next(left))  # type: ignore[misc]
        noise = (fmt.decode(words) - x).double() / scale
        variance += float((noise * later[step]).square().sum())
        if step >= since:
            error += float(((x - exact) / scale).sum())
            total += float((exact / scale).sum())
    return Run(error / variance**0.5, error / total)


def impulses(step: int, g: torch.Generator) -> Tensor:
    """A gradient in 1 % of the steps."""
    return (torch.rand(SHAPE, generator=g) < 0.01).float()


def rows(step: int, g: torch.Generator) -> Tensor:
    """Whole rows, as of an embedding, have no gradient in 98 % of the steps."""
    return (torch.rand(SHAPE[0], 1, generator=g) < 0.02).float()


def constant(step: int, g: torch.Generator) -> Tensor:
    return torch.ones(SHAPE)


def stopped(step: int, g: torch.Generator) -> Tensor:
    """Normal gradients with a mean, and none after 60 steps."""
    return (torch.randn(SHAPE, generator=g) + 1) * (step < 60)


def squares(step: int, g: torch.Generator) -> Tensor:
    return torch.randn(SHAPE, generator=g).square()


class Case(NamedTuple):
    gradient: Gradient
    decay: float
    steps: int
    since: int = 0


AVERAGES = {
    "impulses .9": Case(impulses, 0.9, 400),
    "impulses .95": Case(impulses, 0.95, 400),
    "impulses .99": Case(impulses, 0.99, 400),
    "rows .9": Case(rows, 0.9, 400),
    "rows .99": Case(rows, 0.99, 400),
    "constant .9": Case(constant, 0.9, 60),
    "constant .99": Case(constant, 0.99, 300),
    "stopped .9": Case(stopped, 0.9, 160, since=60),
    "stopped .99": Case(stopped, 0.99, 400, since=60),
}


@pytest.mark.parametrize("case", AVERAGES)
def test_an_average_moves_at_its_rate(case: str) -> None:
    c = AVERAGES[case]
    found = run(format_named("i8q8"), drawn, c.gradient, c.decay, 1 - c.decay, c.steps, c.since)
    assert abs(found.errors) < STANDARD_ERRORS, found


SECONDS = {
    "average of squares": Case(squares, 0.999, 500),
    "average of constants": Case(constant, 0.999, 500),
    "sum of constants": Case(constant, 1.0, 500),
}


@pytest.mark.parametrize("case", SECONDS)
@pytest.mark.parametrize("name", ["u8q16", "u16q16"])
def test_a_second_moment_and_a_sum_are_right_in_expectation(name: str, case: str) -> None:
    c = SECONDS[case]
    found = run(format_named(name), drawn, c.gradient, c.decay, 1 - c.decay or 1.0, c.steps, c.since)
    assert abs(found.errors) < STANDARD_ERRORS, found


@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_to_nearest_an_average_stops_within_half_a_gap_over_one_less_the_decay(decay: float) -> None:
    """Of i16q8: a step (1 - decay) * (g - m) is lost once it is below half a gap between codes."""
    fmt, gradient = format_named("i16q8"), torch.exp2(-8 * torch.arange(128.0) / 127)
    gradient[0], value = 1.5, torch.zeros(128)
    for _ in range(round(20 / (1 - decay))):
        value = fmt.decode(fmt.encode(value * decay + gradient * (1 - decay)))
    power = 2.0 * ROOTS["i16q8"].curve.linear
    half = 0.5 * 8 * ROOTS["i16q8"].curve.step * (gradient + power) / (2 * gradient + power) ** 0.125
    short = (gradient - value) / (half / (1 - decay))
    assert float(short.max()) < 1.02
    assert float(short.max()) > 0.7  # so the bound is not far off
    assert float(short.min()) > -0.02


def test_weights_of_rows_that_are_zero_98_percent_of_the_time_move_as_far_as_in_float64() -> None:
    """Through `compile`: rows are independent, so their standard deviation gives the standard error."""
    n, g = 128, torch.Generator().manual_seed(1)
    scale = torch.exp2(-6 * torch.arange(128.0) / 127).expand(n, 128)
    p = torch.nn.Parameter(torch.zeros(n, 128))
    strategy = {"param": "bf16+fp32", "momentum_buffer": "i8q8"}
    sgd = torch.optim.SGD([p], lr=1e-2, momentum=0.99)
    optimizer = collage_neuron.compile(sgd, strategy=strategy, verbose=False)
    m = theta = torch.zeros(n, 128, dtype=torch.float64)
    for _ in range(400):
        grad = (scale * (torch.rand(n, 1, generator=g) < 0.02)).bfloat16()
        p.grad = grad
        optimizer.step()
        m = 0.99 * m + grad.double()
        theta = theta - 1e-2 * m
    moved = collage_neuron.exact_value(optimizer, p).double().sum(1) / theta.sum(1) - 1
    assert abs(float(moved.mean())) < STANDARD_ERRORS * float(moved.std()) / n**0.5
    assert float(moved.std()) / n**0.5 < 0.005  # the error was 4.3 % with draws in sequence


@pytest.mark.parametrize("decay", [0.995, 0.998])
def test_the_noise_of_a_second_moment_is_a_matter_of_its_gaps(decay: float) -> None:
    """Its relative variance is near h / 2 for codes h apart, whatever the decay is.

    A step moves a code v by d = (1 - decay) * (g**2 - v), drawn with variance |d| * h * v - d**2. In the long run
    noise**2 = decay**2 * noise**2 + E|d| * h * v - E d**2. For normal g, E|z**2 - 1| is .968, and E (z**2 - 1)**2 is 2.
    """
    fmt, g, steps = format_named("u8q16"), torch.Generator().manual_seed(2), round(3 / (1 - decay))
    value = exact = torch.ones(SHAPE)
    for step in range(steps):
        new = (1 - decay) * torch.randn(SHAPE, generator=g).square()
        left = drawn(step)
        value = fmt.decode(fmt.store("m", value * decay + new, lambda left=left: next(left)))  # type: ignore[misc]
        exact = exact * decay + new
    expected = (0.968 * gap_at_one() - 2 * (1 - decay)) / (1 + decay)
    assert float((value - exact).square().mean()) == pytest.approx(expected, rel=0.1)  # v and its gaps vary by .1


def gap_at_one() -> float:
    """The mean relative distance between codes around an average of 1, in blocks whose power of two is 2 or 1."""
    c = ROOTS["u8q16"].curve
    roots = [(2 / power + c.linear) ** 0.0625 for power in (1, 2)]
    return float(sum(16 * c.step / root for root in roots) / 2)
