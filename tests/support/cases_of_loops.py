"""Loops around steps: groups, states, and gradients that come and go, are left or are missing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from case_arena import Ball, Base, World, case, of_both
from torch.nn import Parameter

# --- between steps: parameters and states -----------------------------------------------------------------------------


class Counting(Ball):
    """Notes what states have, of parameters without gradients too, as code asks that makes what is not there."""

    seen: list[Any]

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            self.seen.append((not self.state[p], len(self.state[p]), self.state[p] == {}))
        return super().step(closure)


@case
def first_gradients_come_late(world: World) -> None:
    """Before them a state has the low word of the parameter alone."""
    world.compile(Counting(world.params)).seen = world.notes
    world.step(4, without=(0, 2))
    world.optimizer.load_state_dict(copy.deepcopy(world.optimizer.state_dict()))
    world.step(4, without=(2,))
    world.step(8)


class Product(Base):
    """Runs as written."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g.reshape(len(g), -1) @ g.reshape(len(g), -1).T @ g, alpha=0.1 * group["lr"])


@case
def gradients_with_graphs(world: World) -> None:
    """As `create_graph=True` leaves them: the objects and their graphs stay."""
    world.compile(Product(world.params))
    for _ in range(20):
        ones = [torch.ones_like(p).requires_grad_() for p in world.params]
        grads = [world.gradient(i, world.taken) * one for i, one in enumerate(ones)]
        for p, g in zip(world.params, grads, strict=True):
            p.grad = g
        world.taken += 1
        world.optimizer.step()
        world.notes.append([p.grad is g and g.requires_grad for p, g in zip(world.params, grads, strict=True)])


# --- groups and settings ----------------------------------------------------------------------------------------------


@case
def groups_are_rebuilt(world: World) -> None:
    """Added, reordered, merged, replaced by a new list; a parameter goes and comes."""
    optimizer = world.compile(Ball([world.params[0]]))
    for p, lr in zip(world.params[1:], (0.03, 0.002), strict=True):
        world.step(5)
        if world.strategy is not None:
            p.data = p.data.bfloat16()
        optimizer.add_param_group({"params": [p], "lr": lr})
    world.step(5)
    optimizer.param_groups.reverse()
    world.step(5)
    last = optimizer.param_groups.pop()
    optimizer.param_groups[0]["params"] += last["params"]
    world.step(5)
    optimizer.param_groups = [{**g, "params": list(reversed(g["params"]))} for g in optimizer.param_groups]
    world.step(5)
    alone = optimizer.param_groups[0]["params"].pop(0)
    world.step(5)
    optimizer.param_groups[0]["params"].append(alone)
    world.step(5)


# --- gradients --------------------------------------------------------------------------------------------------------


@of_both
def gradients_come_and_go(world: World, cls: Any) -> None:
    world.compile(cls(world.params, lr=1e-2))
    for i in range(20):
        world.step(1, without=((0, 1, 2), (0, 1), (0,), (), (1, 2), (2,))[min(i, i % 5 + 1)])


@of_both
def gradients_and_parameters_laid_out_otherwise(world: World, cls: Any) -> None:
    """Transposed, with gaps, channels last, without elements or dimensions; gradients are expanded or transposed."""
    made = torch.Generator().manual_seed(1)
    x = [torch.randn(s, generator=made).bfloat16().float() for s in ((3, 5), (14,), (2, 3, 4, 5), (), (0, 3))]
    given = [x[0].T, x[1][::2], x[2].contiguous(memory_format=torch.channels_last), *x[3:]]
    world.params = [Parameter(t.clone()) for t in given]
    world.compile(cls(world.params, lr=1e-2))
    world.step(5)
    for i in range(5):
        for p in world.params:
            p.grad = torch.full((), 0.5 + i, dtype=p.dtype).expand(p.shape)
        world.optimizer.step()


# --- parameters without gradients -------------------------------------------------------------------------------------

WHEN: dict[str, Callable[[int, int], bool]] = {
    "frozen": lambda step, i: i == 0 or step >= 7,
    "in_turn": lambda step, i: step % 3 == i,
    "late": lambda step, i: step >= 5,
    "gone": lambda step, i: step < 5,
}
"""Whether a parameter has a gradient, by the step and the parameter's number."""


def idle(update: Callable[[Any, Any, Any, Any, float], object]) -> None:
    """Registers loops of an update that is called for parameters without gradients, and in groups without parameters.

    It has the optimizer, the parameter, its state and its group, and the number of the step.
    """

    class Idle(Base):
        t = 0

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.t += 1
            for group in self.param_groups:
                group["n"], group["log"] = group.get("n", 0) + 1, [*group.get("log", ()), self.t]
                for p in group["params"]:
                    update(p, p.grad, self.state[p], group, group["lr"] * self.t)

    for name, when in WHEN.items():

        def loop(world: World, when: Callable[[int, int], bool] = when) -> None:
            world.compile(Idle([{"params": world.params[:1]}, {"params": world.params[1:]}, {"params": []}]))
            for step in range(12):
                world.step(1, without=tuple(i for i in range(3) if not when(step, i)))

        loop.__name__ = f"{update.__name__}_{name}"
        case(loop)


@idle
def idle_decays(p: Any, g: Any, state: Any, group: Any, lr: float) -> None:
    """The parameter, its momentum and its rows, where there is no gradient; and a number is read where there is one."""
    p.mul_(1 - 0.01 * lr)
    if g is None:
        for x in state.values():
            x.mul_(0.5)
    else:
        m, row = state.setdefault("m", torch.zeros_like(p)), state.setdefault("row", torch.zeros(p.shape[:1]))
        row.add_(g.square().view(len(p), -1).mean(1))
        m.lerp_(g, 0.5)
        p.sub_(m / (1 + row.view(-1, *([1] * (p.dim() - 1)))), alpha=lr / max(1.0, float(g.norm())))
