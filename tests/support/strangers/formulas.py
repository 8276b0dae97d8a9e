"""Formulas that change from step to step or from parameter to parameter."""

from __future__ import annotations

import contextvars
import itertools
from typing import Any

import torch
from hostile import Base, hostile


@hostile
class Parity(Base):
    """Signs in odd steps, momentum in even ones."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        if state["n"] % 2:
            p.sub_(state["m"].sign(), alpha=group["lr"])
        else:
            p.sub_(state["m"] * 3, alpha=group["lr"])


@hostile
class Switches(Base):
    """Adam for 30 steps, then momentum, with what Adam's first moment was."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state["n"] = state.get("n", 0) + 1
        m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("m", "v"))
        if state["n"] <= 30:
            m.lerp_(g, 0.1)
            v.lerp_(g * g, 0.01)
            p.addcdiv_(m, v.sqrt().add_(1e-8), value=-group["lr"])
        else:
            state.pop("v")
            m.mul_(0.9).add_(g, alpha=0.1)
            p.sub_(m, alpha=group["lr"])


COUNT = contextvars.ContextVar("count", default=0)


@hostile
class CountsInContext(Base):
    """The count of steps is a context variable."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        COUNT.set(COUNT.get() + 1)
        self.n = COUNT.get()
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        self.first = getattr(self, "first", self.n)
        p.sub_(g, alpha=group["lr"] / (1 + self.n - self.first))


@hostile
class CountsUpdates(Base):
    """A count of updates, not of steps: each parameter's rate is another one."""

    count = 0

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        self.count += 1
        p.sub_(g, alpha=group["lr"] * 10 / (10 + self.count))


@hostile
class CountsOnClass(Base):
    """A count of steps on the class, from where each optimizer was made."""

    count = 0

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        type(self).count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        CountsOnClass.count += 1
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] / CountsOnClass.count)


@hostile
class Iterator(Base):
    """Rates from an iterator, one a step, which looks at the next by taking it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.rates = itertools.cycle([1.0, 0.5, 0.25, 2.0, 3.0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.rate = next(self.rates)
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rate)


@hostile
class Generated(Base):
    """The same from a generator, which nobody can copy."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.rates = (1 / (1 + n) for n in itertools.count())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.rate = next(self.rates)
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rate)
