"""Code that is exchanged, watched or patched."""

from __future__ import annotations

import collections
import functools
import io
import itertools
import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from hostile import Base, World, case, hostile

from strangers.common import Ball


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
