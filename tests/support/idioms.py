"""Ways to write a state that accumulates slowly, and ways to write one that does not: what `plus` must tell apart.

Each is a function of the state of a parameter, its gradient, a decay and the parameter; it updates the state, and
returns what the step is divided by (or, of states that nothing is divided by, what the step is multiplied by).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from as_written import Written
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron

STEPS = 300


def start() -> Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(-1)).bfloat16()


def gradient(step: int) -> Tensor:
    """Large for twenty steps, then smaller, so that a second moment has to come down."""
    noise = torch.randn(24, generator=torch.Generator().manual_seed(step))
    return ((0.5 + noise) * (1.0 if step < 20 else 0.25)).bfloat16()


def stepped(optimizer: Optimizer, p: torch.nn.Parameter, steps: int = STEPS) -> None:
    for step in range(steps):
        p.grad = gradient(step).to(p.dtype)
        optimizer.step()


def error(make: Any, strategy: Any, steps: int = STEPS) -> float:
    """How far the parameter is from its run in float64, as a fraction of the distance that it moved; the worst."""
    p, exact = torch.nn.Parameter(start()), torch.nn.Parameter(start().double())
    optimizer = collage_neuron.compile(make([p]), strategy=strategy)
    stepped(optimizer, p, steps)
    stepped(make([exact]), exact, steps)
    moved = (exact.detach() - start().double()).abs()
    return float(((collage_neuron.exact_value(optimizer, p).double() - exact.detach()).abs() / moved.median()).max())


State = dict[str, Any]
Idiom = Callable[[State, Tensor, float, Tensor], Tensor]


class Dividing(Written):
    """Divides the gradient by what an idiom makes of it."""

    def __init__(self, params: Any, idiom: Idiom, names: tuple[str, ...] = ("v",), beta: float = 0.998) -> None:
        super().__init__(params, lr=0.001, beta=beta)
        self.idiom, self.names = idiom, names

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update({name: torch.zeros_like(p) for name in self.names})
        self.apply(p, g, self.idiom(state, g, group["beta"], p), group["lr"])

    def apply(self, p: Tensor, grad: Tensor, result: Tensor, lr: float) -> None:
        p.sub_(lr * grad / (result + 1e-3))


class Following(Dividing):
    """Goes where an idiom says."""

    def apply(self, p: Tensor, grad: Tensor, result: Tensor, lr: float) -> None:
        p.add_(result, alpha=-lr)


Write = Callable[[State, Tensor, float, Tensor], Any]


def then(write: Write, read: Callable[[State, Tensor, float], Any]) -> Idiom:
    """An idiom that writes states, and returns what is read from them afterwards."""

    def idiom(s: State, g: Tensor, b: float, p: Tensor) -> Tensor:
        write(s, g, b, p)
        result: Tensor = read(s, g, b)
        return result

    return idiom


def named(name: str, write: Write) -> Idiom:
    """An idiom that returns a state as it is."""
    return then(write, lambda s, g, b: s[name])


def rooted(name: str, write: Write) -> Idiom:
    """An idiom that returns the root of a state."""
    return then(write, lambda s, g, b: s[name].sqrt())


def of_v(update: Callable[[Tensor, Tensor, float], Any]) -> Idiom:
    """An idiom that writes `v` in place, and divides by its root."""
    return rooted("v", lambda s, g, b, p: update(s["v"], g, b))


def new_v(update: Callable[[Tensor, Tensor, float], Tensor]) -> Idiom:
    """An idiom that puts another tensor in the place of `v`."""
    return rooted("v", lambda s, g, b, p: s.update(v=update(s["v"], g, b)))


def wide(x: Tensor) -> Tensor:
    """In fp32, or in float64 where all is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _masked(v: Tensor, g: Tensor, b: float) -> None:
    square = g * g
    square[g.abs() > 100.0] = 1e4
    v.mul_(b).add_(square, alpha=1 - b)


def _yogi(v: Tensor, g: Tensor, b: float) -> None:
    square = g * g
    v.addcmul_(torch.sign(v - square), square, value=-(1 - b))


AVERAGES: dict[str, Idiom] = {
    "mul_, addcmul_": of_v(lambda v, g, b: v.mul_(b).addcmul_(g, g, value=1 - b)),
    "copy of a lerp of a cast": of_v(lambda v, g, b: v.copy_(wide(v).lerp(wide(g).square(), 1 - b))),
    "mask assigned": of_v(_masked),
    "minimum of squares": of_v(lambda v, g, b: v.lerp_(torch.minimum(g * g, g.abs() * 100), 1 - b)),
    "clamped square": of_v(lambda v, g, b: v.lerp_(g.square().clamp(max=1e4), 1 - b)),
    "clamped average": of_v(lambda v, g, b: v.lerp_(g.square(), 1 - b).clamp_(min=1e-12)),
    "maximum with a number": new_v(lambda v, g, b: torch.clamp_min(b * v + (1 - b) * g * g, 1e-12)),
    "rsub": of_v(lambda v, g, b: v.add_((1 - b) * torch.rsub(v, g.square()))),
    "lerp the other way": new_v(lambda v, g, b: torch.lerp(g * g, v, b)),
    "addcmul of a product and a tensor of ones": new_v(
        lambda v, g, b: torch.addcmul(v * b, g * g, torch.ones_like(g), value=1 - b)
    ),
    "addcdiv": new_v(lambda v, g, b: torch.addcdiv(v * b, g * g, torch.full_like(g, 4.0), value=4 * (1 - b))),
    "exp of a logarithm": of_v(lambda v, g, b: v.mul_(b).add_((2 * (g.abs() + 1e-6).log()).exp(), alpha=1 - b)),
    "yogi": of_v(_yogi),
}
"""Averages of squares, in `v`: each divides by its root."""


def _belief(new: bool, product: bool) -> Idiom:
    def idiom(s: State, g: Tensor, b: float, p: Tensor) -> Tensor:
        old = s["m"].clone()
        s["m"].lerp_(g, 0.1)
        first = g - (s["m"] if new else old)
        second = g - old
        s["v"].mul_(b).add_(first * second if product else (g - s["m"]) * (g - s["m"]), alpha=1 - b)
        root: Tensor = s["v"].sqrt()
        return root

    return idiom


def _normalised(s: State, g: Tensor, b: float, p: Tensor) -> Tensor:
    s["t"] = s.get("t", 0) + 1
    before, now = 1 - b ** (s["t"] - 1), 1 - b ** s["t"]
    s["v"].mul_(b * before / now).add_(g * g, alpha=(1 - b) / now)
    return s["v"].sqrt()  # type: ignore[no-any-return]


def _average_of_parameters(s: State, g: Tensor, b: float, p: Tensor) -> Tensor:
    if "slow" not in s:
        s["slow"] = p.clone()
    s["slow"].add_(p - s["slow"], alpha=1 - b)
    return 1 + 0.1 * (p - s["slow"])  # type: ignore[no-any-return]


OTHERS: dict[str, tuple[Idiom, tuple[str, ...], set[str]]] = {
    "(g - m) * (g - m) in two nodes": (_belief(new=True, product=False), ("m", "v"), {"v"}),
    "(g - old m) squared": (_belief(new=False, product=True), ("m", "v"), {"v"}),
    "(g - old m) * (g - new m)": (_belief(new=True, product=True), ("m", "v"), {"v"}),
    "cube of the magnitude": (of_v(lambda v, g, b: v.mul_(b).add_(g.abs() ** 3, alpha=1 - b)), ("v",), {"v"}),
    "sum of squares": (
        then(lambda s, g, b, p: s.update(v=s["v"] + g.square()), lambda s, g, b: s["v"].sqrt() / 16), ("v",), {"v"},
    ),
    "maximum with decay": (
        named("v", lambda s, g, b, p: torch.maximum(b * s["v"], g.abs() + 1e-8, out=s["v"])), ("v",), {"v"},
    ),
    "average of an average": (
        rooted("w", lambda s, g, b, p: (s["v"].mul_(0.99).addcmul_(g, g, value=0.01), s["w"].lerp_(s["v"], 1 - b))),
        ("v", "w"), {"v", "w"},
    ),
    "normalised as it is stored": (_normalised, ("v",), {"v"}),
    "kept as its root": (
        named("v", lambda s, g, b, p: s.update(v=(b * s["v"] * s["v"] + (1 - b) * g * g).sqrt())), ("v",), {"v"},
    ),
    "average of parameters": (_average_of_parameters, (), {"slow"}),
    "average of step sizes": (
        then(lambda s, g, b, p: (s["v"].mul_(0.99).addcmul_(g, g, value=0.01),
                                 s["rate"].lerp_(1 / (s["v"].sqrt() + 1e-2), 1 - b)),
             lambda s, g, b: 1 / (s["rate"] + 1e-3)),
        ("v", "rate"), {"v", "rate"},
    ),
}  # fmt: skip
"""Other slow states: the idiom, the states that start as zeros, and which are slow."""


def of_m(update: Callable[[Tensor, Tensor, float, Tensor], Any]) -> Idiom:
    """A first moment `m`, written in place, which the step follows."""
    return named("m", lambda s, g, b, p: update(s["m"], g, b, p))


def _lion(s: State, g: Tensor, b: float, p: Tensor) -> Tensor:
    direction = s["m"].lerp(g, 0.1).sign()
    s["m"].lerp_(g, 1 - b)
    return direction  # type: ignore[no-any-return]


def _second(s: State, g: Tensor) -> Any:
    return s["v"].mul_(0.999).addcmul_(g, g, value=0.001)


FAST: dict[str, tuple[Idiom, tuple[str, ...], set[str]]] = {
    "lerp_": (of_m(lambda m, g, b, p: m.lerp_(g, 1 - b)), ("m",), set()),
    "heavy ball": (of_m(lambda m, g, b, p: m.mul_(b).add_(g)), ("m",), set()),
    "with weight decay": (of_m(lambda m, g, b, p: m.mul_(b).add_(g.add(p, alpha=0.1), alpha=1 - b)), ("m",), set()),
    "with a mask": (of_m(lambda m, g, b, p: m.copy_(torch.where(m * g > 0, b * m + g, m))), ("m",), set()),
    "clipped": (of_m(lambda m, g, b, p: m.mul_(b).add_(g.clamp(-1, 1))), ("m",), set()),
    "of signs": (of_m(lambda m, g, b, p: m.lerp_(g.sign(), 1 - b)), ("m",), set()),
    "of g * sign(m)": (of_m(lambda m, g, b, p: m.mul_(b).add_(g * m.sign(), alpha=1 - b)), ("m",), set()),
    "nesterov": (
        then(lambda s, g, b, p: s["m"].mul_(b).add_(g), lambda s, g, b: g.add(s["m"], alpha=b)), ("m",), set(),
    ),
    "lion": (_lion, ("m",), set()),
    "momentum of momentum": (
        named("n", lambda s, g, b, p: (s["m"].lerp_(g, 0.1), s.update(n=b * s["n"] + (1 - b) * s["m"]))),
        ("m", "n"), set(),
    ),
    "largest second moment, by where": (
        then(lambda s, g, b, p: (_second(s, g), s.update(most=torch.where(s["v"] > s["most"], s["v"], s["most"]))),
             lambda s, g, b: g / (s["most"].sqrt() + 1e-3)),
        ("v", "most"), {"v"},
    ),
    "centered": (
        then(lambda s, g, b, p: (_second(s, g), s["m"].lerp_(g, 1 - b)),
             lambda s, g, b: g / (torch.sqrt((s["v"] - s["m"] * s["m"]).clamp(min=0)) + 1e-2)),
        ("m", "v"), {"v"},
    ),
}  # fmt: skip
"""States of which all but those named are no slow accumulators."""
