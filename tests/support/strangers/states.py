"""States: where they are, and what they share."""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from hostile import Base, World, case, hostile
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


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
