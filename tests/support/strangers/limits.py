"""Extreme numbers, empty tensors, threads and errors in the middle."""

from __future__ import annotations

import contextlib
import math
import threading
from typing import Any

import torch
from hostile import Base, World, case, hostile
from torch.nn import Parameter

from strangers.common import Ball, momentum


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
