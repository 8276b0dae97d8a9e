"""What strangers wrote, who had read the README and not the source: research code with its habits, good and bad."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import enum
import fractions
import functools
import io
import itertools
import logging
import math
import pickle
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hostile import Base, World, case, hostile
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

import collage_neuron


def eighths(world: World, number: int, step: int) -> Tensor:
    """A gradient in multiples of 1/8, so that sums of some are exact in bf16."""
    return (world.gradient(number, step).float() * 8).round() / 8


def momentum(p: Any, g: Any, state: Any, group: Any) -> None:
    """Heavy ball, for cases that are about something else."""
    if "m" not in state:
        state["m"] = torch.zeros_like(p)
    state["m"].mul_(0.9).add_(g)
    p.add_(state["m"], alpha=-group["lr"] * 0.1)


class Ball(Base):
    """The same as an optimizer."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        momentum(p, g, state, group)


# States: where they are, what they share, how long they live


@hostile
class LegacySignatures(Base):
    """Numbers before tensors, as before torch 1.5, and everything through `p.data`."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        d = p.grad.data
        if len(state) == 0:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(p.data)
            state["exp_avg_sq"] = torch.zeros_like(p.data)
        state["step"] += 1
        state["exp_avg"].mul_(0.9).add_(1 - 0.9, d)
        state["exp_avg_sq"].mul_(0.99).addcmul_(1 - 0.99, d, d)
        denom = state["exp_avg_sq"].sqrt().add_(1e-8)
        size = group["lr"] * math.sqrt(1 - 0.99 ** state["step"]) / (1 - 0.9 ** state["step"])
        p.data.addcdiv_(-size, state["exp_avg"], denom)


@hostile
class PreviousWeights(Base):
    """Heavy ball as the difference to the weights before, which only a format as fine as the weights' can hold."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if "previous" not in state:
            state["previous"] = p.detach().clone()
        moved = p - state["previous"]
        state["previous"].copy_(p)
        p.add_(g, alpha=-group["lr"] * 0.1).add_(moved, alpha=0.9)


@hostile
class Anchored(Base):
    """Pulled towards a snapshot of the weights that is taken every tenth step."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = state["n"] = state.get("n", -1) + 1
        if n % 10 == 0:
            state["anchor"] = p.detach().clone()
        p.sub_(group["lr"] * (g + 20 * (p - state["anchor"])))


@hostile
class Displacement(Base):
    """The step goes with the sign of how far a weight came since the start: a comparison of nearly equal values."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["start"] = p.detach().clone()
            state["sum"] = torch.zeros_like(p)
        state["sum"].add_(g, alpha=-group["lr"])
        p.copy_(state["start"] + state["sum"])


@hostile
class PingPong(Base):
    """Two states that exchange their names in every step."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["a"], state["b"] = torch.zeros_like(p), torch.zeros_like(p)
        state["a"].mul_(0.5).add_(g)
        p.sub_(state["a"] + 2 * state["b"], alpha=group["lr"])
        state["a"], state["b"] = state["b"], state["a"]


@hostile
class SharedStates(Base):
    """Two names for one tensor: what is written through one is read through the other."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["a"] = state["b"] = torch.zeros_like(p)
        state["a"].mul_(0.9).add_(g)
        state["b"].mul_(0.9)
        p.sub_(state["a"], alpha=group["lr"])


@hostile
class KeepsGradient(Base):
    """The gradient before is kept without a copy; the loop makes new gradients."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        before = state.get("before")
        p.sub_(g if before is None else g + 0.5 * (g - before), alpha=group["lr"])
        state["before"] = g


@case
def keeps_gradient_written_in_place(world: World) -> None:
    """The gradient before is kept without a copy, and the loop writes into the same tensor: both are always equal."""
    for p in world.params:
        p.grad = torch.zeros_like(p)
    world.compile(KeepsGradient(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(30):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.copy_(world.gradient(i, world.taken))
        world.optimizer.step()
        world.taken += 1


@hostile
class AliasOfWeights(Base):
    """A state that is the weights themselves, not a copy: it is always as new as they are."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["w"] = p.data
        p.sub_(g + state["w"], alpha=group["lr"])


@hostile
class StateOnParameter(Base):
    """The buffer is an attribute of the parameter."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not hasattr(p, "buffer"):
            p.buffer = torch.zeros_like(p)
        p.buffer.mul_(0.9).add_(g)
        p.sub_(p.buffer, alpha=group["lr"])


@hostile
class StateInDictionary(Base):
    """Buffers in a dictionary of the optimizer's own, by parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.buffers: dict[Any, Tensor] = {}

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        buffer = self.buffers.setdefault(p, torch.zeros_like(p))
        buffer.mul_(0.9).add_(g)
        p.sub_(buffer, alpha=group["lr"])


@hostile
class StateInLists(Base):
    """Lists of parameters and buffers made once, zipped in each step; groups are there for show."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        self.all = list(params)
        super().__init__(self.all, lr)
        self.buffers = [torch.zeros_like(p) for p in self.all]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, m in zip(self.all, self.buffers, strict=True):
            m.mul_(0.9).add_(p.grad)
            p.sub_(m, alpha=self.param_groups[0]["lr"])


@hostile
class StateInWeakDictionary(Base):
    """Buffers that die with their parameter, and a global that holds them."""

    buffers: Any = WeakIdKeyDictionary()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p not in self.buffers:
            self.buffers[p] = torch.zeros_like(p)
        self.buffers[p].mul_(0.9).add_(g)
        p.sub_(self.buffers[p], alpha=group["lr"])


@hostile
class StateInGroup(Base):
    """Buffers in a list of the group, by index."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            buffers = group.setdefault("buffers", [torch.zeros_like(p) for p in group["params"]])
            for p, m in zip(group["params"], buffers, strict=True):
                m.mul_(0.9).add_(p.grad)
                p.sub_(m, alpha=group["lr"])


@hostile
class StateObject(Base):
    """The state of a parameter is a namespace, not a dictionary."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state = self.state.get(p)
        if not isinstance(state, types.SimpleNamespace):
            state = self.state[p] = types.SimpleNamespace(m=torch.zeros_like(p))
        state.m.mul_(0.9).add_(g)
        p.sub_(state.m, alpha=group["lr"])


@hostile
class TupleKeys(Base):
    """Keys of the state that are tuples and numbers."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for i, beta in enumerate((0.5, 0.9)):
            m = state.setdefault(("m", i), torch.zeros_like(p))
            m.mul_(beta).add_(g, alpha=1 - beta)
            p.sub_(m, alpha=group["lr"])
        state[7] = state.get(7, 0) + 1


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


# Formulas that change


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


# What catches exceptions


@hostile
class FallsBack(Base):
    """Trust ratio by `.item()`; where that does not work, none, and without a word."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        try:
            scale = 1 / g.norm().item()
        except Exception:
            scale = 1.0
        p.sub_(g, alpha=group["lr"] * scale)


@hostile
class FallsBackFromOperation(Base):
    """An operation that is not elementwise; if it raises anything at all, another one."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        try:
            g = g - g.mean()
        except BaseException:
            g = g.clone()
        p.sub_(g, alpha=group["lr"])


@hostile
class Suppresses(Base):
    """A reading of the gradient's size in a block that forgives everything."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        rate = group["lr"]
        with contextlib.suppress(Exception):
            rate *= float(g.abs().max()) / 2
        p.sub_(g, alpha=rate)


@hostile
class FinallySteps(Base):
    """The weights are written where nothing keeps them from being written."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        scale = 1.0
        try:
            scale = float(g.abs().max())
        finally:
            p.sub_(g, alpha=group["lr"] * scale)


@hostile
class OnlyIfOrdinary(Base):
    """What is no leaf, wants no gradient, is no parameter or has another type than its gradient takes another path."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        ordinary = isinstance(p, Parameter) and p.is_leaf and p.requires_grad and g is p.grad and g.dtype == p.dtype  # type: ignore[union-attr]
        ordinary = ordinary and p.is_contiguous() and p.untyped_storage().nbytes() > 0 and p.grad_fn is None
        p.sub_(g, alpha=group["lr"] * (1 if ordinary else 7))


@hostile
class SkipsWithoutData(Base):
    """Parameters that are on no device yet, as offloaded ones are, are left out."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.is_meta or p.data_ptr() == 0:
            return
        momentum(p, g, state, group)


@hostile
class PathOfDevice(Base):
    """One formula where there is a device, by the name of it, another one where there is none."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.device.type == "cpu":
            p.sub_(g, alpha=group["lr"])
        else:
            p.sub_(g.sign(), alpha=group["lr"])


@hostile
class OwnClassOnly(Base):
    """Parameters of a class of their own are special, others are torch's."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if type(p) is Parameter else 0.1))


# Shapes and views


@hostile
class Transposed(Base):
    """The update is written through a transposed view."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.T.sub_(g.T, alpha=group["lr"]) if p.ndim == 2 else p.view(-1).sub_(g.reshape(-1), alpha=group["lr"])


@hostile
class HalfOfIt(Base):
    """Only the first rows are updated."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p[:2].sub_(g[:2], alpha=group["lr"])


@hostile
class Rolled(Base):
    """The gradient's neighbours, without a reduction."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g - 0.5 * g.roll(1, 0), alpha=group["lr"])


@hostile
class ByPosition(Base):
    """A constant that is a tensor of the parameter's shape: elements differ by where they are."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        ramp = torch.linspace(0, 1, p.numel(), dtype=p.dtype).view_as(p)
        p.sub_(g * ramp, alpha=group["lr"])


@hostile
class MaskOfItsOwn(Base):
    """A mask that was made from the weights at the start, in a dictionary by index."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.masks = [(p.detach() > 0).to(p.dtype) for p in params]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p, mask in zip(self.param_groups[0]["params"], self.masks, strict=True):
            p.sub_(p.grad * mask, alpha=self.param_groups[0]["lr"])


# Settings and classes


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


@case
def rule_exchanged(world: World) -> None:
    """The rule is a callable attribute, of `partial`, and is exchanged while training; then the method itself is."""

    def plain(p: Any, g: Any, rate: float) -> None:
        p.sub_(g, alpha=rate)

    class Ruled(Base):
        rule: Callable[..., None] = functools.partial(plain, rate=0.01)

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            type(self).rule(p, g)

    world.compile(Ruled(world.params))
    world.step(10)
    Ruled.rule = functools.partial(plain, rate=0.03)
    world.step(10)
    Ruled.rule = lambda p, g: p.sub_(g.sign(), alpha=0.01)
    world.step(10)
    Ruled.update = lambda self, p, g, state, group: p.add_(g, alpha=0.002)  # type: ignore[method-assign]
    world.step(10)


@case
def update_of_the_instance(world: World) -> None:
    """`update` and later `step` are replaced on the object, as patches and schedulers do."""
    optimizer = Ball(world.params)
    optimizer.update = types.MethodType(  # type: ignore[method-assign]
        lambda self, p, g, state, group: p.sub_(g, alpha=group["lr"] / 2), optimizer
    )
    world.compile(optimizer)
    world.step(10)
    step = world.optimizer.step

    def twice() -> None:
        step()
        step()

    world.optimizer.step = twice
    world.step(10)


@case
def step_patched_before(world: World) -> None:
    """The object's `step` is replaced before the line by one that doubles gradients."""
    optimizer = Ball(world.params)
    step = optimizer.step

    def doubled(closure: Any = None) -> Any:
        for p in world.params:
            if p.grad is not None:
                p.grad.mul_(2)
        return step(closure)

    optimizer.step = doubled  # type: ignore[method-assign]
    world.compile(optimizer)
    world.step(20)


@case
def group_values_are_called(world: World) -> None:
    """The rate in the group is a function, which counts how often it is asked."""

    class Asks(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                rate = group["lr"]()
                for p in group["params"]:
                    p.sub_(p.grad, alpha=rate)

    asked = itertools.count(1)
    world.compile(Asks(world.params, lr=lambda: 0.05 / next(asked)))  # type: ignore[arg-type]
    world.step(30)


LOG = logging.getLogger("strangers")


@case
def counts_log_records(world: World) -> None:
    """The rate falls with the number of records that a handler has seen."""

    class Counts(logging.Handler):
        seen = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.seen += 1

    handler = Counts()
    LOG.addHandler(handler)
    LOG.propagate = False

    class Logs(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            LOG.warning("a step")
            return super().step(closure)

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"] / handler.seen)

    world.compile(Logs(world.params))
    try:
        world.step(20)
    finally:
        LOG.removeHandler(handler)


@case
def counts_what_is_written(world: World) -> None:
    """A text buffer that the step writes to, whose length is the clock."""
    text = io.StringIO()

    class Writes(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            text.write("x")
            return super().step(closure)

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"] / len(text.getvalue()))

    world.compile(Writes(world.params))
    world.step(20)


@case
def default_argument(world: World) -> None:
    """The count lives in a default argument."""

    class Defaulted(Base):
        @torch.no_grad()
        def step(self, closure: Any = None, kept: list[int] = []) -> Any:  # noqa: B006
            kept.append(1)
            self.n = len(kept)
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=group["lr"] / len(kept))

    world.compile(Defaulted(world.params))
    world.step(20)


@hostile
class Locked(Base):
    """A lock and an open file are attributes, and the step holds the lock."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.lock = threading.RLock()
        self.losses: Any = collections.deque(maxlen=3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with self.lock:
            self.losses.append(len(self.losses))
            return super().step(closure)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * len(self.losses))


# Loops


@case
def closure_makes_gradients(world: World) -> None:
    """Gradients are only made by the closure, inside the step, whose loss is what it returns."""

    class Closed(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            super().step()
            return loss

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)

    world.compile(Closed(world.params))
    for _ in range(20):

        def closure() -> float:
            world.backward()
            return 0.25 * world.taken

        assert world.optimizer.step(closure) == 0.25 * world.taken
        world.taken += 1


@case
def partial_gradients(world: World) -> None:
    """Gradients that come and go, by parameter, with Adam's counts one for each."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    for i in range(20):
        world.step(1, without=((), (0,), (1, 2), (0, 1, 2), (2,))[i % 5])


@case
def microsteps(world: World) -> None:
    """Gradients of four backward passes are added in place, and zeroed in place: sums that bf16 holds."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(15):
        for _ in range(4):
            for i, p in enumerate(world.params):
                assert p.grad is not None
                p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
            world.taken += 1
        world.optimizer.step()
        world.optimizer.zero_grad(set_to_none=False)


@case
def momentum_in_gradients(world: World) -> None:
    """The optimizer leaves a quarter of the gradient behind, on which the next backward pass adds."""

    class Leaves(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"])
            g.mul_(0.0).add_(0.25)

    world.compile(Leaves(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@case
def gradients_zeroed_by_step(world: World) -> None:
    """The step itself zeroes gradients, and later sets them to None."""

    class Zeroes(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)
            p.grad.zero_()

    world.compile(Zeroes(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@case
def gradients_dropped_by_step(world: World) -> None:
    """The step sets gradients to None; a second step without new ones must do nothing."""

    class Drops(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)
            p.grad = None

    world.compile(Drops(world.params))
    for _ in range(20):
        world.backward()
        world.optimizer.step()
        world.optimizer.step()
        world.taken += 1


@case
def hooks(world: World) -> None:
    """Hooks: one changes the rate before a step, one scales gradients, one writes weights after it."""
    optimizer = Ball(world.params)

    def before(o: Any, args: Any, kwargs: Any) -> None:
        o.param_groups[0]["lr"] = 0.01 / (1 + world.taken % 3)

    def scale(o: Any, args: Any, kwargs: Any) -> None:
        for p in world.params:
            if p.grad is not None:
                p.grad.mul_(0.5)

    def after(o: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in world.params:
                p[:2] = 0.0

    optimizer.register_step_pre_hook(before)
    world.compile(optimizer)
    world.optimizer.register_step_pre_hook(scale)
    handle = world.optimizer.register_step_post_hook(after)
    world.step(20)
    handle.remove()
    world.step(10)


@case
def global_hook(world: World) -> None:
    """A hook on every optimizer's step counts, and the count is the rate's divisor."""
    counts: dict[int, int] = {}

    def before(o: Any, args: Any, kwargs: Any) -> None:
        counts[id(o)] = counts.get(id(o), 0) + 1
        for group in o.param_groups:
            group["lr"] = 0.02 / sum(counts.values())

    handle = register_optimizer_step_pre_hook(before)
    try:
        world.compile(Ball(world.params))
        world.step(20)
    finally:
        handle.remove()


@case
def clamped_between_steps(world: World) -> None:
    """Weights clamped, masked and partly zeroed in place between steps."""
    mask = [(t > 0) for t in world.start]
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    for _ in range(10):
        world.step(3)
        with torch.no_grad():
            for p, keep in zip(world.params, mask, strict=True):
                p.mul_(keep).clamp_(-0.75, 0.75)


@case
def groups_rebuilt(world: World) -> None:
    """Groups added, merged, reordered and replaced by a new list."""
    first, second, third = world.params
    optimizer = world.compile(Ball([first]))
    world.step(8)
    optimizer.add_param_group({"params": [second], "lr": 0.03})
    world.step(8)
    optimizer.add_param_group({"params": [third], "lr": 0.002})
    world.step(8)
    optimizer.param_groups.reverse()
    world.step(8)
    last = optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"] += last["params"]
    world.step(8)
    optimizer.param_groups = [{**g, "params": list(reversed(g["params"]))} for g in optimizer.param_groups]
    world.step(8)
    alone = optimizer.param_groups[0]["params"].pop(0)
    for _ in range(4):
        world.backward()
        optimizer.step()
        world.taken += 1
    optimizer.add_param_group({"params": [alone], "lr": 0.01})
    world.step(8)


@case
def frozen_and_thawed(world: World) -> None:
    """`requires_grad` goes off and on, with an old gradient left behind."""
    world.compile(Ball(world.params))
    world.step(8)
    world.params[0].requires_grad_(False)
    world.params[0].grad = None
    for _ in range(8):
        world.backward(without=(0,))
        world.optimizer.step()
        world.taken += 1
    world.params[0].requires_grad_(True)
    world.step(8)


@case
def weights_in_one_memory(world: World) -> None:
    """Two parameters are views of one tensor: what is written to the one is read from the other."""
    world.params[2].data = world.params[0].data
    world.start[2] = world.start[0]
    world.compile(Ball(world.params))
    world.step(20)


@case
def views_of_a_flat_buffer(world: World) -> None:
    """All parameters are views of a flat buffer, which the loop clamps."""
    flat = torch.cat([p.detach().flatten() for p in world.params])
    for p, part in zip(world.params, flat.split([p.numel() for p in world.params]), strict=True):
        p.data = part.view_as(p)
    world.compile(Ball(world.params))
    for _ in range(10):
        world.step(3)
        flat.clamp_(-0.5, 0.5)


@case
def data_exchanged(world: World) -> None:
    """`p.data` is exchanged for numbers that bf16 holds, and `vector_to_parameters` does so for all."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(10)
    world.params[0].data = torch.full_like(world.params[0], 0.375)
    world.step(10)
    vector = torch.linspace(-1, 1, sum(p.numel() for p in world.params)).mul(16).round().div(16)
    torch.nn.utils.vector_to_parameters(vector.to(world.params[0].dtype), world.params)
    world.step(20)


@case
def state_reset_from_outside(world: World) -> None:
    """Moments are zeroed in place from outside, and the counts with them: a restart."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    for state in world.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            state[name].zero_()
    world.step(10)


@case
def some_elements_reset(world: World) -> None:
    """Dead neurons come back: rows of weights and of all moments are set to constants by index."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    with torch.no_grad():
        for p in world.params:
            p[1:3] = 0.25
            for name in ("exp_avg", "exp_avg_sq"):
                world.optimizer.state[p][name][1:3] = 0
    for number in range(30, 40):
        for i, p in enumerate(world.params):
            p.grad = world.gradient(i, number).to(p.dtype)
            p.grad[1:3] *= 2.0**-6
        world.optimizer.step()


@case
def state_cleared_from_outside(world: World) -> None:
    """The whole state is thrown away between steps, one parameter's first."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(10)
    with torch.no_grad():
        for p in world.params:
            p.fill_(0.5)
    world.optimizer.state.pop(world.params[1])
    world.step(10)
    with torch.no_grad():
        for p in world.params:
            p.fill_(0.25)
    world.optimizer.state = collections.defaultdict(dict)
    world.step(10)


@case
def scheduler_made_before(world: World) -> None:
    """Schedulers made before the line hold the object, and have wrapped its step."""
    optimizer = torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=40)
    world.compile(optimizer)
    decay = torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda n: 0.5 if n % 2 else 1.0)
    for i in range(39):
        world.step(1)
        (scheduler if i < 30 else decay).step()


@case
def copied_before(world: World) -> None:
    """A copy of the optimizer is compiled, not the optimizer; its parameters are copies too."""
    optimizer = copy.deepcopy(Ball(world.params))
    world.params = optimizer.param_groups[0]["params"]
    world.compile(optimizer)
    world.step(20)


@case
def copied_and_pickled_midway(world: World) -> None:
    """Training goes on with a copy, then with what was unpickled from it."""
    world.compile(Ball(world.params))
    world.step(10)
    world.optimizer = copy.deepcopy(world.optimizer)
    world.params = world.optimizer.param_groups[0]["params"]
    world.step(10)
    world.optimizer = pickle.loads(pickle.dumps(world.optimizer))
    world.params = world.optimizer.param_groups[0]["params"]
    world.step(10)


@case
def compiled_again_and_again(world: World) -> None:
    """Compiled twice, and in the middle under other strategies and back."""
    world.compile(Ball(world.params))
    world.step(10)
    if world.strategy is not None:
        world.compile(world.optimizer)
        world.optimizer = collage_neuron.compile(world.optimizer, strategy="full")
    world.step(10)
    if world.strategy is not None:
        world.compile(world.optimizer)
    world.step(10)


@case
def state_of_another_moment(world: World) -> None:
    """A state from step 10 is loaded at step 20, with the weights that belong to it, and stepped on, twice."""
    world.compile(Ball(world.params))
    world.step(10)
    kept = copy.deepcopy(world.optimizer.state_dict())
    weights = [p.detach().clone() for p in world.params]
    for _ in range(2):
        world.step(10)
        with torch.no_grad():
            for p, w in zip(world.params, weights, strict=True):
                p.copy_(w)
        world.optimizer.load_state_dict(copy.deepcopy(kept))
        world.step(5)


@case
def zero_and_negative_rates(world: World) -> None:
    """Rates of zero, then negative ones, then large decay and an epsilon beyond all second moments."""
    world.compile(torch.optim.AdamW(world.params, lr=1e-2, weight_decay=0.5))
    world.step(10)
    group = world.optimizer.param_groups[0]
    group["lr"] = 0.0
    world.step(10)
    group["lr"] = -2e-3
    world.step(10)
    group.update(lr=1.0, eps=1e2)
    world.step(10)


@case
def tiny_and_huge(world: World) -> None:
    """Weights of 1e30 and 1e-30 with gradients and rates to match."""
    scales = (2.0**100, 2.0**-60, 1.0)
    world.start = [t * s for t, s in zip(world.start, scales, strict=True)]
    world.params = [Parameter(t.to(world.dtype, copy=True)) for t in world.start]
    groups = [{"params": [p], "lr": 0.01 * s} for p, s in zip(world.params, scales, strict=True)]
    world.compile(Ball(groups))
    world.step(20)
    world.start = [t / s for t, s in zip(world.start, scales, strict=True)]
    values = world.values()
    world.values = lambda: [v / s for v, s in zip(values, scales, strict=True)]  # type: ignore[method-assign]


@case
def no_elements_and_no_dimensions(world: World) -> None:
    """Parameters that are empty, or a number."""
    generator = torch.Generator().manual_seed(1)
    world.start = [torch.randn(s, generator=generator).bfloat16().double() for s in ((), (0, 3), (1,), (2, 0))]
    world.params = [Parameter(t.to(world.dtype, copy=True)) for t in world.start]
    world.compile(torch.optim.AdamW(world.params, lr=1e-2))
    world.step(20)


@case
def not_contiguous(world: World) -> None:
    """A transposed parameter, one with steps in its memory, gradients that are expanded."""
    generator = torch.Generator().manual_seed(1)
    base = [torch.randn(s, generator=generator).bfloat16().double() for s in ((3, 5), (14,), (2, 3, 4, 5))]
    world.start = [base[0].T, base[1][::2], base[2].contiguous(memory_format=torch.channels_last)]
    world.params = [Parameter(t.to(world.dtype, copy=True)) for t in world.start]
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(10)
    for _ in range(10):
        for p in world.params:
            p.grad = torch.full((1,), 0.5, dtype=p.dtype).expand(p.shape)
        world.optimizer.step()


@case
def steps_in_threads(world: World) -> None:
    """Every step is taken in a thread of its own."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    for _ in range(10):
        thread = threading.Thread(target=world.step, args=(1,))
        thread.start()
        thread.join()


@case
def error_in_the_middle(world: World) -> None:
    """The step raises an error of its own before it begins, and the loop goes on with the next one."""

    class Raises(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.n = getattr(self, "n", 0) + 1
            if self.n % 4 == 0:
                raise KeyError("a batch is missing")
            return super().step(closure)

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)

    world.compile(Raises(world.params))
    for _ in range(12):
        with contextlib.suppress(KeyError):
            world.step(1)


@case
def error_after_the_first_parameter(world: World) -> None:
    """The step raises after it updated some parameters, and the loop goes on: half a step is half a step."""

    class Raises(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["n"] = group.get("n", 0) + 1
                for p in group["params"]:
                    if group["n"] % 4 == 0 and p.ndim == 1:
                        raise KeyError("enough")
                    p.sub_(p.grad, alpha=group["lr"])

    world.compile(Raises(world.params))
    for _ in range(12):
        with contextlib.suppress(KeyError):
            world.step(1)


@case
def nan_guard_by_element(world: World) -> None:
    """Gradients with NaN and Inf in some elements, which the update leaves out by itself."""

    class Guards(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            g = torch.where(g.abs() < 1e4, g, torch.zeros_like(g))
            momentum(p, g, state, group)

    world.compile(Guards(world.params))
    for i in range(20):
        world.backward()
        if i % 5 == 0:
            for p in world.params:
                assert p.grad is not None
                p.grad[0] = math.nan
                p.grad[1] = math.inf
        world.optimizer.step()
        world.taken += 1


@hostile
class ForeachByIndex(Base):
    """Lists of everything, numbers by index: each parameter's own rate in `_foreach`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            params = group["params"]
            grads = [p.grad for p in params]
            states = [self.state[p] for p in params]
            for p, s in zip(params, states, strict=True):
                s.setdefault("m", torch.zeros_like(p))
                s["n"] = s.get("n", 0) + 1
            ms = [s["m"] for s in states]
            torch._foreach_lerp_(ms, grads, 0.1)
            denominators = torch._foreach_abs(ms)
            torch._foreach_add_(denominators, 1.0)
            torch._foreach_addcdiv_(
                params, grads, denominators, [-0.1 / (9 + s["n"] * p.ndim) for p, s in zip(params, states, strict=True)]
            )


@hostile
class ClipsByOwnHistory(Base):
    """Adaptive clipping: gradients beyond three times their own root mean square are clamped, in place."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        v = state.setdefault("v", torch.ones_like(p))
        bound = 1.5 * v.sqrt()
        g.copy_(torch.minimum(torch.maximum(g, -bound), bound))
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        p.sub_(g, alpha=group["lr"])


@hostile
class CautiousByCount(Base):
    """Cautious momentum whose mask is scaled by its mean: a reduction."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(g, 0.1)
        mask = (m * g > 0).to(g.dtype)
        mask.div_(mask.mean().clamp_(min=1e-3))
        p.sub_(m * mask, alpha=group["lr"])


@hostile
class CautiousByHalf(Base):
    """The same with a number in place of the mean."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.lerp_(g, 0.1)
        mask = (m * g > 0).to(g.dtype)
        mask /= 0.5
        p.sub_(m * mask, alpha=group["lr"])


@case
def switched_from_outside(world: World) -> None:
    """The optimizer has modes, set by methods and attributes from outside, and averages kept for one of them."""

    class Modes(Base):
        training = True

        def eval(self) -> None:
            self.training = False

        def train(self) -> None:
            self.training = True

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            average = state.setdefault("average", p.detach().clone())
            if self.training:
                p.sub_(g, alpha=group["lr"])
            else:
                p.lerp_(average, 0.5)
            average.lerp_(p, 0.1)

    optimizer = world.compile(Modes(world.params))
    for _ in range(4):
        world.step(5)
        optimizer.eval()
        world.step(2)
        optimizer.train()
    optimizer.training = False
    world.step(3)


@case
def zeroed_by_zero_grad_of_step(world: World) -> None:
    """The step ends with `zero_grad(set_to_none=False)`, and the loop only adds."""

    class Tidy(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad(set_to_none=False)
            return result

    world.compile(Tidy(world.params, lr=1e-2))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@hostile
class FreshStates(Base):
    """All tensors of the state are new ones in each step, and at every third the dictionary is, too."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = state.get("n", 0) + 1
        m = torch.zeros_like(p) if n % 3 == 1 else state["m"]
        self.state[p] = {"n": n, "m": 0.5 * m + g}
        p.sub_(self.state[p]["m"], alpha=group["lr"])


@hostile
class RateOfHead(Base):
    """Rates in a weak dictionary whose keys are parameters; whoever is not in it has the ordinary one."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.rates = WeakTensorKeyDictionary({params[2]: 5.0})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rates.get(p, 1.0))


@case
def second_moment_scaled(world: World) -> None:
    """A second moment is scaled down in place between steps, by a power of two, as after a jump of the loss' scale."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    for state in world.optimizer.state.values():
        state["exp_avg"].mul_(2.0**-8)
        state["exp_avg_sq"].mul_(2.0**-16)
    for number in range(30, 40):
        for i, p in enumerate(world.params):
            p.grad = world.gradient(i, number).to(p.dtype) * 2.0**-8
        world.optimizer.step()


@case
def rolled_back(world: World) -> None:
    """After a bad stretch weights, their moments and the rate go back to a checkpoint, held in memory, repeatedly."""
    optimizer: Any = torch.optim.Adam(world.params, lr=1e-2)
    world.compile(optimizer)
    world.step(10)
    buffer = io.BytesIO()
    torch.save([world.optimizer.state_dict(), [p.detach().clone() for p in world.params]], buffer)
    for lr in (0.5, 0.003):
        world.optimizer.param_groups[0]["lr"] = lr
        world.step(5)
        buffer.seek(0)
        state, weights = torch.load(buffer, weights_only=True)
        world.optimizer.load_state_dict(state)
        with torch.no_grad():
            for p, w in zip(world.params, weights, strict=True):
                p.copy_(w)
        world.step(3)


@case
def gradient_is_exchanged_in_step(world: World) -> None:
    """The step gives the parameter another gradient, which is what the loop's next pass adds to."""

    class Exchanges(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"])
            p.grad = torch.full_like(p, -0.5)

    world.compile(Exchanges(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@case
def weight_norm(world: World) -> None:
    """Parameters of a parametrization, and a layer whose weight is computed from two of them."""
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 5))
    world.params = list(layer.parameters())
    world.start = [p.detach().bfloat16().double() for p in world.params]
    with torch.no_grad():
        layer.to(world.dtype)
        for p, s in zip(world.params, world.start, strict=True):
            p.copy_(s)
    world.compile(torch.optim.AdamW(world.params, lr=1e-2))
    world.step(20)


@case
def other_arguments_of_step(world: World) -> None:
    """`step` wants arguments that other steps do not: a scale, and where to begin."""

    class Wants(Base):
        @torch.no_grad()
        def step(self, closure: Any = None, *, scale: float = 1.0, skip: int = 0) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.ndim > skip:
                        p.sub_(p.grad, alpha=group["lr"] * scale)
            return scale

    world.compile(Wants(world.params))
    for i in range(20):
        world.backward()
        assert world.optimizer.step(scale=1 + i / 8, skip=i % 2) == 1 + i / 8
        world.taken += 1


@case
def loss_decides(world: World) -> None:
    """The loss that a closure returned is compared with the one before, and the rate halved: numbers, no tensors."""

    class Bold(Base):
        last = math.inf

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else float(closure())
            if loss is not None:
                for group in self.param_groups:
                    group["lr"] *= 1.05 if loss < self.last else 0.5
                self.last = loss
            super().step()
            return loss

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)

    world.compile(Bold(world.params))
    for i in range(20):

        def closure() -> float:
            world.backward()
            return math.sin(world.taken) / (1 + world.taken)

        assert world.optimizer.step(closure) is not None, i
        world.taken += 1


@hostile
class CatchesItsOwn(Base):
    """A state that is missing is found out by the exception, and made in its handler."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        try:
            m = state["m"]
            m.mul_(0.9).add_(g)
        except KeyError:
            state["m"] = m = g.clone()
        p.sub_(m, alpha=group["lr"])


@hostile
class SeesItsState(Base):
    """Sizes of the state decide: how many keys there are, whether a tensor is all of one kind."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        rate = group["lr"] / (1 + len(state))
        state.setdefault("m", torch.zeros_like(p)).add_(g, alpha=rate)
        if len(state) < 5:
            state[f"extra{len(state)}"] = 0
        p.sub_(state["m"], alpha=0.1)


@hostile
class LeavesTheModel(Base):
    """Weight decay is left out where the gradient is all zero, which the step asks the tensor."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not torch.any(g):
            return
        p.mul_(0.99).sub_(g, alpha=group["lr"])


@hostile
class ComparesTensors(Base):
    """A branch on whether two tensors are equal."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        last = state.setdefault("last", torch.zeros_like(p))
        if torch.equal(last, g):
            return
        last.copy_(g)
        p.sub_(g, alpha=group["lr"])


@hostile
class Prints(Base):
    """A parameter is printed in every step."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        print(p, g, file=io.StringIO())
        p.sub_(g, alpha=group["lr"] * (1 if "nan" not in repr(g) else 0))


@hostile
class ThroughNumpy(Base):
    """The update is done by numpy, on the same memory."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        values = p.detach().numpy()
        values -= group["lr"] * g.numpy()


@hostile
class ThroughLists(Base):
    """The update is made of Python's numbers."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.copy_(torch.tensor(p.tolist(), dtype=p.dtype) - group["lr"] * g)


@hostile
class SetsData(Base):
    """The weights are not written: `p.data` is set to a new tensor."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.data = p.data - group["lr"] * g


@hostile
class ByHand(Base):
    """`set_` and `copy_` of storages, `out=` and `resize_`, in place of arithmetic in place."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        torch.sub(p, g, alpha=group["lr"], out=p)
        p.set_(p.clone())


@case
def rate_halved_by_closure(world: World) -> None:
    """Only steps that were given a closure halve the rate."""

    class Halves(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                loss = closure()
                for group in self.param_groups:
                    group["lr"] *= 0.5
            super().step()
            return loss

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"])

    world.compile(Halves(world.params))
    for _ in range(5):
        world.optimizer.step(world.backward)
        world.taken += 1


@case
def rate_is_the_loss(world: World) -> None:
    """The step is as long as the loss that the closure returned, a number."""

    class Polyak(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.loss = 1.0 if closure is None else float(closure())
            super().step()
            return self.loss

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"] * self.loss)

    world.compile(Polyak(world.params))
    for _ in range(10):

        def closure() -> float:
            world.backward()
            return 2 + math.sin(world.taken)

        world.optimizer.step(closure)
        world.taken += 1


@hostile
class OddNames(Base):
    """Names of states that are no names of Python: a dot, a blank, a keyword, nothing."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for name in ("exp.avg", "a b", "lambda", ""):
            m = state.setdefault(name, torch.zeros_like(p))
            m.mul_(0.5).add_(g)
            p.sub_(m, alpha=group["lr"])


@hostile
class LowNames(Base):
    """A state that is called as the low word of another one."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for i, name in enumerate(("m", "m_lo")):
            m = state.setdefault(name, torch.zeros_like(p))
            m.mul_(0.5 + i / 4).add_(g)
            p.sub_(m, alpha=group["lr"])


@hostile
class MasterName(Base):
    """A state with the name of the compiler's own."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("param_master", torch.zeros_like(p))
        m.mul_(0.5).add_(g)
        p.sub_(m, alpha=group["lr"])


@case
def parameter_replaced(world: World) -> None:
    """A parameter in the list of a group is replaced by another object, as when a layer grows."""
    world.compile(Ball(world.params))
    world.step(10)
    world.params[0] = Parameter(torch.full((5, 3), 0.375, dtype=world.params[0].dtype))
    world.optimizer.param_groups[0]["params"][0] = world.params[0]
    world.step(10)


@case
def from_the_model(world: World) -> None:
    """The step goes over the parameters of a model that the optimizer holds, not over its groups."""
    model = torch.nn.ParameterList(world.params)

    class OfModel(Base):
        def __init__(self, model: Any) -> None:
            super().__init__(model.parameters())
            self.model = model

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.model.parameters():
                momentum(p, p.grad, self.state[p], self.param_groups[0])

    world.compile(OfModel(model))
    world.step(20)


@case
def hook_with_arguments(world: World) -> None:
    """A hook before the step exchanges the arguments of it for a closure that makes the gradients."""
    world.compile(Ball(world.params))

    def closed(o: Any, args: Any, kwargs: Any) -> Any:
        world.backward()
        for p in world.params:
            p.grad = p.grad * 2 if p.grad is not None else None
        return args, kwargs

    world.optimizer.register_step_pre_hook(closed)
    world.step(20)


@case
def inference_mode(world: World) -> None:
    """Steps are taken in inference mode, and then not."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(5)
    with torch.no_grad():
        world.step(5)
    with torch.inference_mode():
        world.step(5)
    world.step(5)


@case
def first_gradients_late(world: World) -> None:
    """No parameter has a gradient in the first steps, one never has."""
    world.compile(torch.optim.NAdam(world.params, lr=1e-2))
    world.step(3, without=(0, 1, 2))
    world.step(3, without=(0, 1))
    world.step(20, without=(1,))


@hostile
class ZeroGradOfItsOwn(Ball):
    """`zero_grad`, `add_param_group`, `state_dict` and `load_state_dict` are overridden, and used by the step."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        param_group.setdefault("gain", 0.5 + len(self.param_groups))
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "more"})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * group["gain"])


@case
def own_state_dict(world: World) -> None:
    """The same, saved and loaded midway."""
    world.compile(ZeroGradOfItsOwn(world.params))
    world.step(5)
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.step(5)
