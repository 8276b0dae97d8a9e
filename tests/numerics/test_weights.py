"""Weights against float64: AdamW, 2000 steps at lr 1e-4, beta2 = 0.999 and weight decay 0.1, theta ~ N(0, 0.02).

The error is a fraction of the distance travelled. The gradients have, for each element, a mean and noise around it.
The issue's bounds on `plus` hold where there is both (a mean of a tenth of the noise is enough). At the two ends they
do not, in either arithmetic, and the tests say by how much and that the bf16 first moment is the cause:

* pure drift: m stops where (1 - beta1) * (g - m) is below half an ulp of m, some ulps short of g;
* pure noise: every rounding of m stays in it for ten steps and moves the weights, which otherwise go nowhere.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from oracles import (
    DRIFT_STREAMS,
    Driver,
    Setting,
    adamw64,
    decay_slots,
    distance_error,
    drift_streams,
    initial_weights,
    one_thread,
    start64,
)
from torch import Tensor

import collage_neuron
from collage_neuron.states.store import read_exact

ISSUE = Setting(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)

PLUS = {"bf16": 2e-3, "fp32": 1e-3}
"""The issue's bound for `plus`, by arithmetic."""
FULL = 5e-4
"""The issue's bound for `full`."""

DRIFTING = ("drift", "weak drift")


class Runs(NamedTuple):
    """theta after STEPS steps, float64, shape (2, streams, ELEMENTS): with weight decay, and without."""

    theta: Tensor
    exact: Tensor

    def error(self, stream: str) -> float:
        """The error of the run with weight decay, as a fraction of the distance travelled."""
        row = DRIFT_STREAMS.index(stream)
        start = initial_weights(1)[0].double()
        return distance_error(self.theta[0, row], self.exact[0, row], start).item()

    def realised_decay(self, stream: str) -> float:
        """What the weights lost to weight decay, as a fraction of what they should have.

        Runs with and without decay see the same gradients, hence have the same m and v: exactly, their difference is
        what decay took, and the stored weights' difference is projected onto it.
        """
        row = DRIFT_STREAMS.index(stream)
        nominal = self.exact[0, row] - self.exact[1, row]
        taken = self.theta[0, row] - self.theta[1, row]
        return (torch.dot(taken, nominal) / torch.dot(nominal, nominal)).item()


@cache
@one_thread()
def exact(setting: Setting) -> Tensor:
    decay = torch.tensor([setting.weight_decay, 0.0], dtype=torch.float64)[:, None, None]
    s = start64(initial_weights(len(DRIFT_STREAMS)))
    for t, g in enumerate(drift_streams(), 1):
        s = adamw64(s, g, t, lr=setting.lr, betas=setting.betas, eps=1e-8, weight_decay=decay)
    return s.theta


slots = cache(decay_slots)


@cache
@one_thread()
def run(strategy: str, arithmetic: str, setting: Setting = ISSUE, steps: int | None = None) -> Runs:
    theta = initial_weights(len(DRIFT_STREAMS)).expand(2, -1, -1)
    driver = Driver(theta, strategy, arithmetic)
    for g, numbers in islice(zip(drift_streams(), slots(setting), strict=True), steps):
        driver.step(g, numbers)
    return Runs(driver.value("param"), exact(setting))


BOUNDS: list[tuple[str, str, str, float, float]] = [
    *(("plus", a, stream, 0.0, bound) for a, bound in PLUS.items() for stream in DRIFTING),
    *(("full", "fp32", stream, 0.0, FULL) for stream in (*DRIFTING, "pure noise")),
    ("full", "fp32", "pure drift", 0.0, PLUS["fp32"]),
    # The bounds can fail.
    *(("bf16", a, stream, 0.5, torch.inf) for a in PLUS for stream in DRIFT_STREAMS),
    # The issue's bound cannot be met by a bf16 first moment that stops up to five ulps short of g, nor where there is
    # noise alone: ten steps long, each half ulp of m is in the weights, whose steps otherwise cancel.
    *(("plus", a, "pure drift", bound, 5 * 2**-7) for a, bound in PLUS.items()),
    *(("plus", a, "pure noise", bound, 2**-7) for a, bound in PLUS.items()),
]


@pytest.mark.whole
@pytest.mark.parametrize(("strategy", "arithmetic", "stream", "above", "most"), BOUNDS)
def test_the_error_of_the_weights(strategy: str, arithmetic: str, stream: str, above: float, most: float) -> None:
    error = run(strategy, arithmetic).error(stream)
    assert error <= most
    assert error > above or above == 0.0


@one_thread()
def test_the_compiled_optimizer_takes_the_same_steps() -> None:
    """The first 200 through `optimizer.step()`, bit for bit the driven update that stands for it in other tests."""
    p = torch.nn.Parameter(initial_weights(len(DRIFT_STREAMS)))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p], **ISSUE._asdict()), strategy="plus")
    for g in islice(drift_streams(), 200):
        p.grad = g
        optimizer.step()
    assert torch.equal(read_exact(p, optimizer.state[p], "param").double(), run("plus", "fp32", steps=200).theta[0])


# With gradients of zero a step is about one unit of the low word, so that single weights are off by some tenths. In
# plain bf16, whose terms are rounded apart, no decay arrives: the check can fail.
DECAYS = [
    *((s, "fp32", stream, 0.99, 1.01) for s in ("plus", "full") for stream in (*DRIFTING, "pure noise")),
    ("plus", "fp32", "no gradient", 0.99, torch.inf),
    *(("bf16", "bf16", stream, -torch.inf, 0.01) for stream in ("pure noise", "no gradient")),
]


@pytest.mark.whole
@pytest.mark.parametrize(("strategy", "arithmetic", "stream", "least", "most"), DECAYS)
def test_weight_decay_is_realised(strategy: str, arithmetic: str, stream: str, least: float, most: float) -> None:
    assert least <= run(strategy, arithmetic).realised_decay(stream) <= most
    assert run(strategy, arithmetic).error(stream) < 0.25 or strategy == "bf16"


SMALL_STEPS: dict[str, tuple[float, float | None, float]] = {
    "lr 1e-5": (1e-5, None, 2e-5),
    "lr 1e-6": (1e-6, None, 2e-4),
    "theta 1": (1e-4, 1.0, 6e-5),
}
"""Learning rate, the value of all weights (None: as above), and the error allowed under `fp32`.

Twice what one rounding of the parameter a step costs. Rounded after the decay and again after the step, the parameter
loses the same part of the decay step after step: 2.1e-4, 3.8e-3 and 4.4e-4.
"""


@pytest.mark.parametrize("case", SMALL_STEPS)
@one_thread()
def test_master_weights_are_rounded_once_a_step(case: str) -> None:
    lr, value, bound = SMALL_STEPS[case]
    setting, row = ISSUE._replace(lr=lr), DRIFT_STREAMS.index("weak drift")
    theta = initial_weights(1) if value is None else torch.full_like(initial_weights(1), value)
    driver, s = Driver(theta[None], "fp32", "fp32"), start64(theta)
    for t, (g, numbers) in enumerate(zip(drift_streams(), slots(setting), strict=True), 1):
        driver.step(g[row], numbers[:1])
        s = adamw64(s, g[row], t, lr=lr, betas=setting.betas, eps=1e-8, weight_decay=setting.weight_decay)
    assert distance_error(driver.value("param")[0], s.theta, theta.double()).item() <= bound
