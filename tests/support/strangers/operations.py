"""Unusual operations."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from hostile import Base, World, case, hostile


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
