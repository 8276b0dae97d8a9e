"""States: how long they live, and what else is kept beside them."""

from __future__ import annotations

from typing import Any

import torch
from hostile import Base, hostile


@hostile
class LateAndEarly(Base):
    """A state that appears at step 10, is renamed at 20 and gone at 30."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = state["n"] = state.get("n", 0) + 1
        if n == 10 and "m" not in state:
            state["m"] = g.clone()
        if n == 20 and "m" in state:
            state["late"] = state.pop("m")
        if n == 30:
            state.pop("late")
        m = state.get("m", state.get("late"))
        if m is not None:
            m.mul_(0.9).add_(g)
        p.sub_(g if m is None else m, alpha=group["lr"])


@hostile
class Restarts(Base):
    """All states are thrown away every twentieth step."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if state.get("n", 0) == 20:
            state.clear()
        if not state:
            state.update(n=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["n"] += 1
        state["m"] = 0.9 * state["m"] + 0.1 * g
        state["v"] = 0.9 * state["v"] + 0.1 * g * g
        p.sub_(group["lr"] * state["m"] / (state["v"].sqrt() + 1e-6))


@hostile
class CountsByElement(Base):
    """An integer and a mask for each element: how often its gradient was positive, whether it was ever large."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["count"] = torch.zeros_like(p, dtype=torch.int32)
            state["large"] = torch.zeros_like(p, dtype=torch.bool)
        state["count"] += (g > 0).int()
        state["large"] |= g.abs() > 2
        p.sub_(torch.where(state["large"], g, 3 * g) / (1 + state["count"]), alpha=group["lr"])


@hostile
class Product(Base):
    """Bias correction by a running product of betas that change, in a tensor without dimensions."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["left"] = torch.ones((), dtype=p.dtype)
            state["n"] = 0
            state["m"] = torch.zeros_like(p)
        state["n"] += 1
        beta = 0.95 * (1 - 1 / (1 + state["n"]))
        state["left"].mul_(beta)
        state["m"].lerp_(g, 1 - beta)
        p.sub_(group["lr"] * state["m"] / (1 - state["left"]))


@hostile
class Lookahead(Base):
    """Slow weights inside: every fifth step both become their mean."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["slow"] = p.detach().clone()
            state["n"] = 0
        state["n"] += 1
        p.sub_(g, alpha=group["lr"])
        if state["n"] % 5 == 0:
            state["slow"] += 0.5 * (p - state["slow"])
            p.copy_(state["slow"])


@hostile
class Delayed(Base):
    """Gradients are summed for three steps and applied in the fourth, which begins anew."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state["sum"] = g.clone() if state.get("sum") is None else state["sum"] + g
        state["n"] = state.get("n", 0) + 1
        if state["n"] % 4 == 0:
            p.sub_(state["sum"] / 4, alpha=group["lr"])
            state["sum"] = None


@hostile
class AverageInside(Base):
    """An average of the weights is kept, and is what the weights become in the last step."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state.setdefault("average", p.detach().clone())
        state["n"] = state.get("n", 0) + 1
        p.sub_(g, alpha=group["lr"])
        state["average"].lerp_(p, 0.02)
        if state["n"] == 60:
            p.copy_(state["average"])


@hostile
class OwnKahan(Base):
    """Kahan's summation, by hand: the compiler's own trick, in the way of it."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        lost = state.setdefault("lost", torch.zeros_like(p))
        y = -group["lr"] * g - lost
        t = p + y
        lost.copy_((t - p) - y)
        p.copy_(t)


@hostile
class OwnMaster(Base):
    """A float master copy of the optimizer's own; the weights are a cast of it."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["master"] = p.detach().clone().float()
        state["master"].sub_(g.float(), alpha=group["lr"])
        p.data.copy_(state["master"])


@hostile
class EpsilonOfType(Base):
    """The epsilon is that of the weights' type: next to nothing, as long as they are not bf16."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        v = state.setdefault("v", torch.zeros_like(p))
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        p.sub_(group["lr"] * g / (v.sqrt() + torch.finfo(p.dtype).eps))
