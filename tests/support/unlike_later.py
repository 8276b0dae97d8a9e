"""Optimizers that treat parameters alike at first and differently later, with the same operations and other numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

# Third-party code is rarely typed: `Any` here keeps the spellings as they are found.

AT = 10
"""The step from which on the numbers differ; no step at which everything is compared (1, 2, 4, 8, ...)."""


class Later(Optimizer):
    """Descent that counts its steps, with the rate that `rate` says from step `AT` on."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.n = self.k = 0
        self.seen: list[Any] = []
        self.rates: dict[Any, float] = {}
        self.prepare(self.param_groups[0]["params"])

    def prepare(self, params: Any) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for j, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * (1.0 if self.n < AT else self.rate(group, j, i, p)))

    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 1.0


class First(Later):
    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 4.0 if i == 0 else 1.0


class Last(Later):
    """A head whose rate grows."""

    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 4.0 if i == len(group["params"]) - 1 else 1.0


class Freeze(Later):
    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 0.0 if i < self.n // AT else 1.0


class LayerWise(Later):
    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 0.5**i


class Live(Later):
    """Divides by the number of parameters with gradients."""

    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 1.0 / sum(q.grad is not None for q in group["params"])


class KeyedById(Later):
    def prepare(self, params: Any) -> None:
        self.rates = {id(q): 1.0 + i for i, q in enumerate(params)}

    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return self.rates.get(id(p), 1.0)


class ByGroup(Later):
    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        return 0.5**j


class Counted(Later):
    """Advances a counter for each parameter."""

    def rate(self, group: Any, j: int, i: int, p: Any) -> Any:
        self.k += 1
        return 1.0 + 0.1 * self.k


class Plain(Optimizer):
    """The same without a position: each subclass tells parameters apart in one other way."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.n = 0
        self.rates = {p: 1.0 + i for i, p in enumerate(self.param_groups[0]["params"])}


class Neighbours(Plain):
    """Reads the numbers of the other states."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.n
            steps = sum(self.state[p]["step"] for p in group["params"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (1.0 if self.n < AT else 5.0 / steps))


class Skip(Plain):
    """Block coordinates: one parameter a step, in turn."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if self.n < AT or i == self.n % 2:
                    p.add_(p.grad, alpha=-group["lr"])


class Flag(Plain):
    """Carries a variable from one parameter to the next."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            first = True
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (4.0 if self.n >= AT and first else 1.0))
                first = False


class Compared(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        head = self.param_groups[0]["params"][0]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (4.0 if self.n >= AT and p is head else 1.0))


class Keyed(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (1.0 if self.n < AT else self.rates.get(p, 1.0)))


class Collected(Plain):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            seen: set[Any] = set()
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * (4.0 if self.n >= AT and not seen else 1.0))
                seen.add(p)


class Independent(Plain):
    """The control: goes through the parameters once, with numbers of the group and of each state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.n += 1
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad, self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(p)
                state["step"] += 1
                state["momentum"].lerp_(grad, 0.1)
                p.add_(state["momentum"], alpha=-lr / state["step"])


LATER = (
    First,
    Last,
    Freeze,
    LayerWise,
    Live,
    KeyedById,
    ByGroup,
    Counted,
    Neighbours,
    Skip,
    Flag,
    Compared,
    Keyed,
    Collected,
)
