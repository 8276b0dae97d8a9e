"""Loops: closures, microsteps, gradients and hooks."""

from __future__ import annotations

from typing import Any

import torch
from hostile import Base, World, case
from torch.optim.optimizer import register_optimizer_step_pre_hook

from strangers.common import Ball, eighths, momentum


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
