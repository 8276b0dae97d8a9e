"""Random numbers, order and identity of parameters."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hostile import Base, World, case, hostile
from torch.utils.weak import WeakIdKeyDictionary


@hostile
class Dice(Base):
    """A rate drawn in each step from the optimizer's own generator of random numbers."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.dice = random.Random(3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.rate = self.dice.random()
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rate)


@hostile
class DiceOfEach(Base):
    """The same, drawn for each parameter, with numpy."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.dice = np.random.default_rng(3)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * float(self.dice.random()))


@hostile
class Noise(Base):
    """Noise on the gradient, by name and in place."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g + torch.empty_like(p).uniform_(-1, 1), alpha=group["lr"])


@hostile
class NoiseByGenerator(Base):
    """Noise from a generator of its own."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.generator = torch.Generator().manual_seed(0)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g + torch.randn(p.shape, generator=self.generator).to(p.dtype), alpha=group["lr"])


@hostile
class NumpyNoise(Base):
    """Noise that comes from numpy, as a tensor that was not made by torch."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        noise = np.random.default_rng(0).standard_normal(tuple(p.shape))
        p.sub_(g + torch.from_numpy(noise).to(p), alpha=group["lr"])


@hostile
class LocalDecay(Base):
    """The rate falls from parameter to parameter, in a variable of the loop."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)
                rate *= 0.5


@hostile
class OneAtATime(Base):
    """Block coordinates: each step updates one parameter, the next in turn."""

    n = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        p = params[self.n % len(params)]
        self.n += 1
        p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@hostile
class RatesByIdentity(Base):
    """Rates in a dictionary by `id`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.rates = {id(p): 1.0 + i for i, p in enumerate(params)}

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rates.get(id(p), 1.0))


@hostile
class MembersOnly(Base):
    """Some parameters are special, by `is`."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.special = params[2:]

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (5 if any(p is q for q in self.special) else 1))


@hostile
class SpecialByWeakReference(Base):
    """Some parameters are special, by weak references."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.special = WeakIdKeyDictionary(dict.fromkeys(params[2:], True))

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (5 if p in self.special else 1))


@case
def marks_on_parameters(world: World) -> None:
    """Texts, dictionaries and flags on parameters; one changes later."""

    class Marked(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            decay = 0.0 if getattr(p, "_no_decay", False) else 0.5
            p.mul_(1 - group["lr"] * decay)
            p.sub_(g, alpha=group["lr"] * p.options["rate"] * (2 if p.role == "head" else 1))

    for i, p in enumerate(world.params):
        p.role, p.options = ("head" if i == 2 else "body"), {"rate": 1.0 + i}  # type: ignore[attr-defined]
    world.params[0]._no_decay = True  # type: ignore[attr-defined]
    world.compile(Marked(world.params))
    world.step(20)
    world.params[0]._no_decay = False  # type: ignore[attr-defined]
    world.params[2].options["rate"] = 0.25  # type: ignore[attr-defined]
    world.step(20)


@hostile
class ByDimensions(Base):
    """Decay for matrices only, rates by the size of what goes in."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.ndim >= 2:
            p.mul_(1 - group["lr"] * 0.5)
        p.sub_(g, alpha=group["lr"] * (3 / p.shape[-1]) / (1 if p.numel() > 10 else 2))
