"""Settings and classes."""

from __future__ import annotations

import dataclasses
import enum
import fractions
from typing import Any, NamedTuple

import numpy as np
import torch
from hostile import Base, World, case, hostile

from strangers.common import Ball


class Rule(enum.Enum):
    SIGN = "sign"
    PLAIN = "plain"


@dataclasses.dataclass
class Settings:
    beta: float = 0.9
    rule: Rule = Rule.PLAIN
    more: dict[str, float] = dataclasses.field(default_factory=dict)


class Betas(NamedTuple):
    first: Any
    second: Any


@case
def settings_objects(world: World) -> None:
    """A dataclass with an enum and a dictionary in it, changed from outside while training."""

    class Configured(Base):
        def __init__(self, params: Any, settings: Settings) -> None:
            super().__init__(params)
            self.settings = settings

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            m = state.setdefault("m", torch.zeros_like(p))
            m.lerp_(g, 1 - self.settings.beta)
            if self.settings.rule is Rule.SIGN:
                p.sub_(m.sign(), alpha=group["lr"])
            else:
                p.sub_(m, alpha=group["lr"] * self.settings.more.get("gain", 1.0))

    settings = Settings()
    world.compile(Configured(world.params, settings))
    world.step(15)
    settings.beta = 0.5
    world.step(15)
    settings.rule = Rule.SIGN
    world.step(15)
    settings.rule, settings.more["gain"] = Rule.PLAIN, 3.0
    world.step(15)


@hostile
class NumbersOfAllKinds(Base):
    """A rate of numpy, betas that are a fraction and a tensor, an epsilon that is an array."""

    def __init__(self, params: Any) -> None:
        betas = Betas(fractions.Fraction(9, 10), torch.tensor(0.75, dtype=torch.float64))
        super().__init__(params, lr=np.float64(0.01), betas=betas, eps=np.array(1e-6))

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m, v = (state.setdefault(k, torch.zeros_like(p)) for k in ("m", "v"))
        first, second = group["betas"]
        m.mul_(float(first)).add_(g, alpha=float(1 - first))
        v.mul_(second).addcmul_(g, g * (1 - second))
        p.sub_(group["lr"] * m / (v.sqrt() + float(group["eps"])))


@case
def betas_in_a_list(world: World) -> None:
    """A list in the defaults, which all groups share and which is written in place."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=[0.9, 0.99]))  # type: ignore[arg-type]
    world.step(20)
    world.optimizer.param_groups[0]["betas"][0] = 0.5
    world.step(20)


@case
def rate_tensor_written_in_place(world: World) -> None:
    """The rate is a tensor, and a schedule writes into it."""
    rate = torch.tensor(0.01, dtype=torch.float64)
    world.compile(Ball(world.params, lr=rate))  # type: ignore[arg-type]
    for _ in range(6):
        world.step(5)
        rate.mul_(0.7)


@hostile
class RateByProperty(Base):
    """A rate that is computed when it is read."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.t = 0

    @property
    def rate(self) -> float:
        return 0.02 / (1 + 0.1 * self.t)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.t += 1
        return result

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=self.rate)


@hostile
class Chameleon(Base):
    """Attributes that are not there are looked up in the first group; those that are set are kept elsewhere."""

    def __init__(self, params: Any) -> None:
        object.__setattr__(self, "_kept", {})
        super().__init__(params)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("kept_"):
            return object.__getattribute__(self, "_kept").get(name, 0)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("kept_"):
            object.__getattribute__(self, "_kept")[name] = value
        else:
            super().__setattr__(name, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.kept_steps: int = self.kept_steps + 1
        return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] / (1 + 0.1 * self.kept_steps))


class Decays:
    """A mixin that decays after whatever comes next."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)  # type: ignore[misc]
        for group in self.param_groups:  # type: ignore[attr-defined]
            for p in group["params"]:
                p.mul_(1 - 0.5 * group["lr"])
        return result


class Clips:
    """A mixin that clips gradients, in place, before whatever comes next."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:  # type: ignore[attr-defined]
            for p in group["params"]:
                p.grad.clamp_(-1, 1)
        return super().step(closure)  # type: ignore[misc]


class Mixed(Decays, Clips, torch.optim.Adam):
    """Three steps in one."""


@case
def mixins(world: World) -> None:
    """Steps of several classes, one around the other, over an optimizer of torch."""
    world.compile(Mixed(world.params, lr=1e-2))
    world.step()


class HalvesRates(torch.optim.SGD):
    """Sets the rate for the time of a step."""

    def step(self, closure: Any = None) -> Any:
        kept = [g["lr"] for g in self.param_groups]
        for g in self.param_groups:
            g["lr"] = g["lr"] / 2
        try:
            return super().step(closure)
        finally:
            for g, lr in zip(self.param_groups, kept, strict=True):
                g["lr"] = lr


@case
def rate_for_the_time_of_a_step(world: World) -> None:
    """Groups are changed and changed back around the step of the class below."""
    world.compile(HalvesRates(world.params, lr=1e-2, momentum=0.5))
    world.step()
