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
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.states import kept_formats

State = dict[str, Any]
LR = 1e-3


class Own(Optimizer):
    """Calls a function with each parameter, its gradient and its state; `t` counts the steps."""

    def __init__(self, params: Any, update: Callable[[Tensor, Tensor, State], Any]) -> None:
        super().__init__(params, {})
        self.update = update

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's returns the loss of a closure
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            s["t"] = s.get("t", 0) + 1
            self.update(p, p.grad, s)


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


CASES = (difference, coupled, dual_averaging, displacement, anchor, climbing, climbing_by_momentum, change, counter,
         restarted_counter, long_momentum)  # fmt: skip


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
    assert kept_formats.of(ours, p)["x"] not in codes


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
    kept = kept_formats.of(ours, p)
    assert (kept["m"], kept["d"], kept["before"]) == ("i8q8", "i8q8", "bf16+int8")


@pytest.mark.parametrize(("beta", "name"), [(0.9, "i8q8"), (0.99, "i8q8"), (0.999, "bf16+int8")])
def test_momentum_of_sgd_has_its_format_from_the_first_step(beta: float, name: str) -> None:
    """The first step only copies the gradient; the one after it shows the decay."""
    p = torch.nn.Parameter(torch.randn(4, 256).bfloat16())
    ours = collage_neuron.compile(torch.optim.SGD([p], lr=LR, momentum=beta), strategy="split312")
    for g in gradients(3):
        p.grad = g
        ours.step()
        assert kept_formats.of(ours, p)["momentum_buffer"] == name
