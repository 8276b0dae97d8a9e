"""States that look like first moments, and whose errors become large: a hostile reader's optimizers, held to float64.

Each moves its parameter in another way: by a difference of averages, to where an average says, by what was kept of an
earlier gradient, or only where a counter allows it. With first moments in 8 or 16 bits, or counters drawn, they were
wrong by 1e-2 to 14 times the distance travelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written
from torch import Tensor

import collage_neuron
from collage_neuron.states.store import record_of

State = dict[str, Any]
LR = 1e-3


class Own(Written):
    """Calls a function with each parameter, its gradient and its state; `t` counts the steps."""

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor, State], Any]) -> None:
        super().__init__(params)
        self.of = update

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["t"] = state.get("t", 0) + 1
        self.of(p, g, state)


def zero(s: State, p: Tensor, *names: str) -> list[Tensor]:
    return [s.setdefault(name, torch.zeros_like(p)) for name in names]


def difference(p: Tensor, g: Tensor, s: State) -> None:
    a, b = zero(s, p, "x", "y")
    a.mul_(0.99).add_(g, alpha=0.01), b.mul_(0.989).add_(g, alpha=0.011)
    p.add_(a - b, alpha=-30 * LR)


def coupled(p: Tensor, g: Tensor, s: State) -> None:
    a, b = zero(s, p, "x", "y")
    new = 0.9 * a + 0.1 * b + 0.1 * g
    b.mul_(0.9).add_(a, alpha=0.1), a.copy_(new)
    p.add_(a + b, alpha=-LR)


def dual_averaging(p: Tensor, g: Tensor, s: State) -> None:
    (z,) = zero(s, p, "x")
    z.mul_(0.999).add_(g), p.copy_(z * -LR)


def displacement(p: Tensor, g: Tensor, s: State) -> None:
    start = s.setdefault("start", p.clone())
    (x,) = zero(s, p, "x")
    x.mul_(0.9).add_(g, alpha=-LR), p.copy_(start + x)


def anchor(p: Tensor, g: Tensor, s: State) -> None:
    if s["t"] % 10 == 1:
        s["x"] = g.clone()
    else:
        p.add_(g - s["x"], alpha=-LR)


def climbing(p: Tensor, g: Tensor, s: State) -> None:
    """Sharpness-aware: up the gradient in odd steps, back in even ones."""
    if s["t"] % 2 == 1:
        s["x"] = g * 0.05
        p.add_(s["x"])
    else:
        p.sub_(s["x"]).add_(g, alpha=-LR)


def climbing_by_momentum(p: Tensor, g: Tensor, s: State) -> None:
    (m,) = zero(s, p, "x")
    p.add_(m, alpha=0.05), m.mul_(0.9).add_(g, alpha=0.1), p.add_(m, alpha=-LR - 0.05)


def change(p: Tensor, g: Tensor, s: State) -> None:
    if "x" in s:
        p.add_(g + 5 * (g - s["x"]), alpha=-LR)
    s["x"] = g.clone()


def counter(p: Tensor, g: Tensor, s: State) -> None:
    n, v = zero(s, p, "x", "v")
    n.add_(g != 0), v.mul_(0.9).addcmul_(g, g, value=0.1)
    p.addcdiv_(g * torch.where(n >= 5, 1.0, 0.0), v.sqrt().add_(1e-8), value=-LR)


def restarted_counter(p: Tensor, g: Tensor, s: State) -> None:
    (n,) = zero(s, p, "x")
    n.copy_(torch.where(n >= 5, 0.0, n + 1))
    p.add_(g * (n == 3), alpha=-LR)


def long_momentum(p: Tensor, g: Tensor, s: State) -> None:
    (m,) = zero(s, p, "x")
    p.add_(m.mul_(0.9995).add_(g), alpha=-LR * 1e-3)


def late_counter(p: Tensor, g: Tensor, s: State) -> None:
    """Advanced in each step, compared in few."""
    (n,) = zero(s, p, "x")
    n.add_(g != 0)
    if s["t"] % 10 == 0:
        p.sub_(g * (n >= 20), alpha=LR)


def average_of_positions(p: Tensor, g: Tensor, s: State) -> None:
    z = s.setdefault("x", p.clone())
    z.lerp_(p - LR * g, 0.05), p.add_(z - p, alpha=0.3).sub_(g, alpha=LR)


def average_with_the_weights(p: Tensor, g: Tensor, s: State) -> None:
    (m,) = zero(s, p, "x")
    m.mul_(0.9).add_(g + 10 * p, alpha=0.1), p.sub_(m - 10 * p, alpha=LR * 0.1)


def size_of_the_weights(p: Tensor, g: Tensor, s: State) -> None:
    p.sub_(g, alpha=LR)
    size = s.setdefault("x", p.abs())
    size.lerp_(p.abs(), 0.1), p.lerp_(p.sign() * size, 0.3)


def weighted_mean_of_weights(p: Tensor, g: Tensor, s: State) -> None:
    w, q = zero(s, p, "x", "q")
    w.add_(g * g), q.add_(p * g * g), p.lerp_(q / (w + 1e-12), 0.01).sub_(g, alpha=LR)


def ratio_of_averages(p: Tensor, g: Tensor, s: State) -> None:
    fast, slow = zero(s, p, "x", "y")
    fast.lerp_(g * g, 0.01), slow.lerp_(g * g, 0.001)
    ratio = fast / (1 - 0.99 ** s["t"]) / (slow / (1 - 0.999 ** s["t"]) + 1e-12)
    p.sub_(g * (ratio - 1), alpha=LR)


def climbing_by_nothing_kept(p: Tensor, g: Tensor, s: State) -> None:
    """The perturbation is kept by a decay of 0."""
    (e,) = zero(s, p, "x")
    if s["t"] % 2 == 1:
        e.mul_(0.0).add_(g, alpha=0.05), p.add_(e)
    else:
        p.sub_(e).sub_(g, alpha=LR)


def decay_by_momentum(p: Tensor, g: Tensor, s: State) -> None:
    """The weights times the size of an average, and nothing of the average itself."""
    (m,) = zero(s, p, "x")
    m.lerp_(g, 0.1), p.sub_(p * m.abs(), alpha=LR)


CASES = (
    decay_by_momentum, difference, coupled, dual_averaging,
    displacement, anchor, climbing, climbing_by_momentum,
    change, counter, restarted_counter, long_momentum,
    late_counter, average_of_positions, average_with_the_weights, size_of_the_weights,
    weighted_mean_of_weights, ratio_of_averages, climbing_by_nothing_kept,
)  # fmt: skip


def gradients(steps: int) -> Any:
    g = torch.Generator().manual_seed(3)
    size, mean = torch.randn(4, 256, generator=g).exp(), torch.randn(4, 256, generator=g) * 0.1
    for _ in range(steps):
        noise = torch.randn(4, 256, generator=g)
        yield ((mean + noise) * size * (torch.rand(4, 256, generator=g) < 0.5)).bfloat16()


@pytest.mark.parametrize("strategy", ["split422", "split312"])
@pytest.mark.parametrize("update", CASES)
def test_errors_stay_small_beside_the_distance(update: Callable[..., Any], strategy: str) -> None:
    """Bounded by what the parameter's own format loses: 16 to 24 bits, beside steps of a thousandth of the weights."""
    start = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    p, exact = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.bfloat16().double())
    ours, theirs = collage_neuron.compile(Own([p], update), strategy=strategy), Own([exact], update)
    for g in gradients(60):
        p.grad, exact.grad = g, g.double()
        ours.step(), theirs.step()
    error = (collage_neuron.exact_value(ours, p).double() - exact.detach()).norm()
    distance = (exact.detach() - start.bfloat16().double()).norm()
    assert error < 5e-3 * distance
    codes = {"i8q8"} if update is long_momentum else {"i8q8", "i16q8", "u16q16"}
    assert record_of(ours, p)["x"] not in codes


def test_a_difference_of_gradients_beside_a_momentum_is_one() -> None:
    """Adan's: what it adds is small beside the momentum, and so are its errors."""

    def adan(p: Tensor, g: Tensor, s: State) -> None:
        m, d, n, before = zero(s, p, "m", "d", "n", "before")
        change = g - before
        m.lerp_(g, 0.02), d.lerp_(change, 0.08), before.copy_(g)
        n.mul_(0.99).addcmul_(g + 0.92 * change, g + 0.92 * change, value=0.01)
        p.addcdiv_(m + 0.92 * d, n.sqrt().add_(1e-8), value=-LR)

    p = torch.nn.Parameter(torch.randn(4, 256).bfloat16())
    ours = collage_neuron.compile(Own([p], adan), strategy="split312")
    for g in gradients(3):
        p.grad = g
        ours.step()
    kept = record_of(ours, p)
    assert (kept["m"], kept["d"], kept["before"]) == ("i8q8", "i8q8", "bf16+int8")


def test_a_number_that_makes_a_state_negative_changes_its_format() -> None:
    """The product of two numbers, of which neither leaves its range, passes 1."""

    def update(p: Tensor, g: Tensor, s: State) -> None:
        (v,) = zero(s, p, "v")
        v.add_((g * g - v).mul(5.0 if s["t"] < 20 else 15.0).mul(0.1)), p.sub_(g * v)

    p = torch.nn.Parameter(torch.randn(4, 256).bfloat16())
    ours = collage_neuron.compile(Own([p], update), strategy="split412")
    for g in gradients(30):
        p.grad = g * 0.1
        ours.step()
    assert p.isfinite().all()
    assert record_of(ours, p)["v"] == "bf16+int16"
