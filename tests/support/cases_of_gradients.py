"""Gradients in loops: that come and go, add up, are left behind, lie otherwise in memory, or are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case_arena import Base, World, case, of_both
from torch.nn import Parameter


@of_both
def gradients_come_and_go(world: World, cls: Any) -> None:
    world.compile(cls(world.params, lr=1e-2))
    for i in range(20):
        world.step(1, without=((0, 1, 2), (0, 1), (0,), (), (1, 2), (2,))[min(i, i % 5 + 1)])


def left_behind(name: str, leave: Callable[[Any, Any, Any], Any]) -> None:
    """Registers a loop that adds to the gradients that the step leaves."""

    class Leaves(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"])
            leave(self, p, g)

    def loop(world: World) -> None:
        world.compile(Leaves(world.params))
        world.step(4, adds=True)
        world.notes.append([None if p.grad is None else p.grad.float().tolist() for p in world.params])

    loop.__name__ = name
    case(loop)


left_behind("gradients_as_they_are", lambda o, p, g: None)
left_behind("gradients_halved", lambda o, p, g: g.mul_(0.5))
left_behind("gradients_set", lambda o, p, g: g.mul_(0.0).add_(0.25))
left_behind("gradients_zeroed", lambda o, p, g: p.grad.zero_())
left_behind("gradients_zeroed_by_zero_grad", lambda o, p, g: o.zero_grad(set_to_none=False))
left_behind("gradients_dropped", lambda o, p, g: setattr(p, "grad", None))
left_behind("gradients_exchanged", lambda o, p, g: setattr(p, "grad", torch.full_like(p, -0.5)))


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
def idle_counts(p: Any, g: Any, state: Any, group: Any, lr: float) -> None:
    """In its state how often there was no gradient, and the step in which it was first seen; in the group the last."""
    state.setdefault("born", group["n"])
    group["last"] = group["n"] if g is None else -group["n"]
    if g is None:
        state["missed"] = state.get("missed", 0) + 1
    else:
        p.sub_(g, alpha=lr * (1 + state.get("missed", 0)) / (state["born"] * group["n"]))


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
