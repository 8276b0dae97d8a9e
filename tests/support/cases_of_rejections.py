"""Loops of which plain torch's behaviour cannot be had: they are rejected, or what they lose is told."""

from __future__ import annotations

import types
from typing import Any

import torch
from case_arena import Ball, Base, World, case, hostile
from torch.optim import SGD

REJECTED = {
    "weights_in_one_memory": r"shares its memory with another parameter",
    "views_of_a_flat_buffer": r"shares its memory with a tensor of shape .*, of which it is a view",
    "a_step_that_was_replaced": r"optimizer.step of this Ball was replaced by hand",
    "NamesOfLowWords": r"a state called 'm_lo'",
    "NamesOfNumbers": r"a state called 'm_scale'",
    "NamesOfMasters": r"a state called 'param_master'",
    "StateIsAnObject": r"keeps an object of type SimpleNamespace as optimizer.state\[p\]; keep a dictionary",
}
WARNED = {"a_hook_decays_the_weights"}


@case
def weights_in_one_memory(world: World) -> None:
    world.params[2].data = world.params[0].data
    world.compile(Ball(world.params))


@case
def views_of_a_flat_buffer(world: World) -> None:
    flat = torch.cat([p.detach().flatten() for p in world.params])
    for p, part in zip(world.params, flat.split([p.numel() for p in world.params]), strict=True):
        p.data = part.view_as(p)
    world.compile(Ball(world.params))
    world.step(3)
    flat.clamp_(-0.5, 0.5)


@case
def a_step_that_was_replaced(world: World) -> None:
    optimizer = Ball(world.params)
    step = optimizer.step
    optimizer.step = lambda closure=None: (step(closure), step(closure))  # type: ignore[method-assign]
    world.compile(optimizer)
    world.step(3)


@hostile
class NamesOfNumbers(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        state["m_scale"] = 0.97 * state.get("m_scale", 1.0)
        p.sub_(state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g), alpha=group["lr"] * state["m_scale"])


@hostile
class NamesOfLowWords(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        for name in ("m", "m_lo"):
            p.sub_(state.setdefault(name, torch.zeros_like(p)).mul_(0.5).add_(g), alpha=group["lr"])


@hostile
class NamesOfMasters(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(state.setdefault("param_master", torch.zeros_like(p)).mul_(0.5).add_(g), alpha=group["lr"])


@hostile
class StateIsAnObject(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not isinstance(self.state[p], types.SimpleNamespace):
            self.state[p] = types.SimpleNamespace(m=torch.zeros_like(p))
        p.sub_(self.state[p].m.mul_(0.9).add_(g), alpha=group["lr"])


@case
def a_hook_decays_the_weights(world: World) -> None:
    """By 1e-3 a step, written to the weights after each step: in bf16 it rounds away."""
    optimizer = world.compile(SGD(world.params, lr=1e-3))

    def decay(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list[torch.Tensor](world.params), 1 - 1e-3)

    optimizer.register_step_post_hook(decay)
    world.step()
