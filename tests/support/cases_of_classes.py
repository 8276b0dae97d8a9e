"""Classes that are more than an update: hooks, code that is exchanged, threads, modes, methods of their own."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from typing import Any

import torch
from case_arena import Ball, Base, World, case, hostile, of_both
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

# --- hooks and code that is exchanged ---------------------------------------------------------------------------------


@case
def hooks(world: World) -> None:
    """Some change the rate, gradients, arguments or weights; one sees the steps of every optimizer."""
    optimizer, counts = Ball(world.params), collections.Counter[int]()

    def before(o: Any, args: Any, kwargs: Any) -> None:
        o.param_groups[0]["lr"] = 0.01 / (1 + world.taken % 3)

    def everywhere(o: Any, args: Any, kwargs: Any) -> None:
        counts[id(o)] += 1
        o.param_groups[0]["lr"] /= sum(counts.values())

    def arguments(o: Any, args: Any, kwargs: Any) -> Any:
        for p in world.params:
            p.grad = p.grad * 0.5 if p.grad is not None else None
        return args, kwargs

    def after(o: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for p in world.params:
                p[:2] = 0.0

    optimizer.register_step_pre_hook(before)
    world.compile(optimizer)
    world.optimizer.register_step_pre_hook(arguments)
    handle = world.optimizer.register_step_post_hook(after)
    of_all = register_optimizer_step_pre_hook(everywhere)
    try:
        world.step(10)
    finally:
        of_all.remove()
    handle.remove()
    world.step(10)
    world.notes.append(list(counts.values()))


@of_both
def steps_in_other_threads_and_modes(world: World, cls: Any) -> None:
    world.compile(cls(world.params, lr=1e-2))
    thread = threading.Thread(target=world.step, args=(5,))
    thread.start()
    thread.join()
    with torch.no_grad():
        world.step(5)
    with torch.inference_mode():
        world.step(5)
    world.step(5)


@case
def an_error_before_the_first_parameter(world: World) -> None:
    """The loop goes on with the next step: what the host has counted stays counted."""

    class Raises(Ball):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            self.n = getattr(self, "n", 0) + 1
            for group in self.param_groups:
                group["n"] = group.get("n", 0) + 1
            if self.n % 4 == 0:
                raise KeyError("a batch is missing")
            return super().step(closure)

    world.compile(Raises(world.params))
    for _ in range(12):
        with contextlib.suppress(KeyError):
            world.step(1)


@case
def what_a_step_logs(world: World) -> None:
    """Handlers hear of each step once, and of none that `compile` tries."""
    heard: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("hostile"), logging.Handler()
    handler.emit = heard.append  # type: ignore[assignment, method-assign]
    logger.addHandler(handler)

    class Logs(Ball):
        def step(self, closure: Any = None) -> Any:
            logger.warning("a step")
            return super().step(closure)

    world.compile(Logs(world.params))
    world.step(5)
    logger.removeHandler(handler)
    world.notes.append(len(heard))


# --- classes ----------------------------------------------------------------------------------------------------------


@case
def a_list_of_its_own(world: World) -> None:
    """The step goes over the parameters of a model that the optimizer holds, and over a list, not over its groups."""

    class OfModel(Ball):
        def __init__(self, model: Any) -> None:
            self.mine = list(model.parameters())
            super().__init__(self.mine)
            self.model = model

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p, q in zip(self.model.parameters(), self.mine, strict=True):
                self.update(p, q.grad, self.state[q], self.param_groups[0])

    world.compile(OfModel(torch.nn.ParameterList(world.params)))
    world.step(20)


@hostile
class ByExactClass(Base):
    """Goes by the exact class of parameters, and by a class of their own."""

    class Own(Parameter):
        rate = 0.1

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params[2] = self.Own(params[2].detach())
        super().__init__(params, lr)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if type(p) is Parameter else p.rate))


@case
def what_the_class_is_and_keeps(world: World) -> None:
    """It counts in `type(self)`, is set from outside, goes by its name, and lists its subclasses."""
    listed: dict[str, Any] = {}

    class Listed(Base):
        taken, rates = 0, {"Mine": 0.02}

        def __init_subclass__(cls, *, key: str) -> None:
            listed[key] = cls

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            type(self).taken += 1
            self.seen = type(self) is self.__class__ is listed["mine"], repr(self).split()[0]
            rate = self.rates.get(type(self).__name__, 0.01) * self.scale()
            p.sub_(g, alpha=rate / (1 + type(self).taken % 3))

        def count(self) -> None:
            type(self).taken += 10

        def scale(self) -> float:
            return 1.0

    class Mine(Listed, key="mine"):
        pass

    world.compile(Mine(world.params))
    world.step(10)
    type(world.optimizer).taken = 4
    world.step(10)
    world.optimizer.count()
    type(world.optimizer).scale, type(world.optimizer).gone = (lambda _: 0.5), 1
    del type(world.optimizer).gone
    world.step(5)
    world.notes += [Mine.taken, type(world.optimizer).taken, *listed]


@case
def states_of_a_factory_of_its_own(world: World) -> None:
    """Also of a copy, of a parameter that comes later, and in a dictionary that makes none."""

    class Made(Base):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.state = collections.defaultdict(lambda: {"n": 4, "m": 0.5})

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            state["n"] += 1
            state["m"] = state["m"] * 0.5 + g
            p.sub_(state["m"], alpha=group["lr"] / state["n"])

    class Plain(Base):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                try:
                    state = self.state[p]
                except KeyError:
                    state = self.state[p] = {"n": 4, "m": 0.5}
                Made.update(self, p, p.grad, state, {"lr": 0.01})  # type: ignore[arg-type]

    plain = Plain(world.params)
    plain.state = {}  # type: ignore[assignment]
    world.compile(plain)
    world.step(3)
    made = Made(world.params[:2])
    world.compile(made)
    world.step(3)
    world.optimizer.add_param_group({"params": world.params[2:]})
    world.step(3)
    world.optimizer.state.clear()
    world.optimizer.state.default_factory = lambda: {"n": 9, "m": 0.25}
    world.step(3)
