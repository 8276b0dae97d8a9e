"""Loops around steps: states and weights that are written, checkpoints, copies, groups, settings, closures."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import itertools
import math
import pickle
from typing import Any

import torch
from case_arena import Ball, Base, World, case, of_both
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW

import collage_neuron

# --- between steps: parameters and states -----------------------------------------------------------------------------


@case
def frozen_and_thawed(world: World) -> None:
    """`requires_grad` goes off and on."""
    world.compile(Ball(world.params))
    world.step(8)
    world.params[0].requires_grad_(False)
    world.step(8, without=(0,))
    world.params[0].requires_grad_(True)
    world.step(8)


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


@case
def weights_are_written(world: World) -> None:
    """Clamped, masked, exchanged and replaced between steps, by numbers that bf16 holds."""
    world.compile(AdamW(world.params, lr=1e-2))
    keep = [p.detach() > 0 for p in world.params]
    for _ in range(5):
        world.step(3)
        with torch.no_grad():
            for p, mask in zip(world.params, keep, strict=True):
                p.mul_(mask).clamp_(-0.75, 0.75)
    world.params[0].data = torch.full_like(world.params[0], 0.375)
    world.step(5)
    vector = torch.linspace(-1, 1, sum(p.numel() for p in world.params)).mul(16).round().div(16)
    torch.nn.utils.vector_to_parameters(vector.to(world.params[0].dtype), world.params)
    world.step(5)
    world.params[0] = Parameter(torch.full((5, 3), 0.375, dtype=world.params[0].dtype))
    world.optimizer.param_groups[0]["params"][0] = world.params[0]
    world.step(5)


@case
def moments_are_written(world: World) -> None:
    """Zeroed with their counts; rows of some set, by index; scaled in place, as after a jump of the loss' scale."""
    world.compile(Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(20)
    for state in world.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            state[name].zero_()
    world.step(10)
    with torch.no_grad():
        for p in world.params:
            p[1:3] = 0.25
            for name in ("exp_avg", "exp_avg_sq"):
                world.optimizer.state[p][name][1:3] = 0
    world.step(10)
    for state in world.optimizer.state.values():
        state["exp_avg"].mul_(2.0**-8)
        state["exp_avg_sq"].mul_(2.0**-16)
    world.step(10)


class Product(Base):
    """Runs as written."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g.reshape(len(g), -1) @ g.reshape(len(g), -1).T @ g, alpha=0.1 * group["lr"])


def gradients_with_graphs(world: World, cls: Any) -> None:
    """As `create_graph=True` leaves them: the objects and their graphs stay."""
    world.compile(cls(world.params))
    for _ in range(20):
        ones = [torch.ones_like(p).requires_grad_() for p in world.params]
        grads = [world.gradient(i, world.taken) * one for i, one in enumerate(ones)]
        for p, g in zip(world.params, grads, strict=True):
            p.grad = g
        world.taken += 1
        world.optimizer.step()
        world.notes.append([p.grad is g and g.requires_grad for p, g in zip(world.params, grads, strict=True)])


of_both(gradients_with_graphs)


@case
def gradients_with_graphs_as_written(world: World) -> None:
    gradients_with_graphs(world, Product)


@of_both
def states_are_cleared(world: World, cls: Any) -> None:
    """A warm restart: moments go, weights must not."""
    optimizer = world.compile(cls(world.params, lr=1e-2))
    world.step(10)
    optimizer.state.clear()
    world.step(10)
    optimizer.state.pop(world.params[1])
    with torch.no_grad():
        for p in world.params:
            p.fill_(0.25)
    world.step(10)
    optimizer.state = collections.defaultdict(dict)
    world.step(10)


@of_both
def a_checkpoint_goes_back_in_time(world: World, cls: Any) -> None:
    """Weights, moments and the rate go back to a file, repeatedly."""
    optimizer = world.compile(cls(world.params, lr=1e-2))
    world.step(10)
    buffer = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach().clone() for p in world.params]], buffer)
    for lr in (0.5, 0.003):
        world.optimizer.param_groups[0]["lr"] = lr
        world.step(5)
        buffer.seek(0)
        state, weights = torch.load(buffer, weights_only=True)
        world.optimizer.load_state_dict(state)
        with torch.no_grad():
            for p, w in zip(world.params, weights, strict=True):
                p.copy_(w)
        world.step(5)


@of_both
def copies_take_over(world: World, cls: Any) -> None:
    """A copy is compiled, copied midway with its parameters, and pickled."""
    optimizer = copy.deepcopy(cls(world.params, lr=1e-2))
    world.params = optimizer.param_groups[0]["params"]
    world.compile(optimizer)
    world.step(10)
    world.params, world.optimizer = copy.deepcopy((world.params, world.optimizer))
    world.step(10)
    world.optimizer = pickle.loads(pickle.dumps(world.optimizer))
    world.params = world.optimizer.param_groups[0]["params"]
    world.step(10)


@case
def compiled_again_and_again(world: World) -> None:
    """Compiled twice, and in the middle under other strategies and back."""
    world.compile(Ball(world.params))
    start = world.start
    for strategy in (world.strategy, "full", world.strategy):
        world.step(10)
        if world.strategy is not None:
            world.optimizer = collage_neuron.compile(world.optimizer, strategy=strategy, verbose=False)
    world.step(10)
    world.start = start


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


@case
def settings_of_groups_change(world: World) -> None:
    """Rates of zero and below, tensors and lists that are written in place, and functions that are called."""

    class Asks(Ball):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 1 - group["betas"][0])
            sign = -1 if group["maximize"] else 1
            p.sub_(m.mul(group["rate"]), alpha=sign * group["lr"] * group["factor"]())

    asked = itertools.count(1)
    optimizer = Asks(world.params, betas=[0.9, 0.5], rate=torch.tensor(0.5, dtype=torch.float64), maximize=False,
                     factor=lambda: 1.0 / next(asked))  # fmt: skip
    world.compile(optimizer)
    group = world.optimizer.param_groups[0]
    for lr in (0.1, 0.0, -0.02, 0.3):
        group["lr"] = lr
        group["betas"][0] = 0.5 + lr
        group["rate"].mul_(0.7)
        group["maximize"] = lr == 0.3
        world.step(5)
    world.notes.append(next(asked))


@dataclasses.dataclass
class Settings:
    beta: float = 0.9
    signs: bool = False
    more: dict[str, float] = dataclasses.field(default_factory=dict)


@case
def objects_and_marks_change(world: World) -> None:
    """Settings in an object, and attributes of parameters, are changed from outside."""

    class Configured(Base):
        def __init__(self, params: Any, settings: Settings) -> None:
            super().__init__(params)
            self.settings = settings

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 1 - self.settings.beta)
            p.mul_(1.0 if getattr(p, "_no_decay", False) else 0.99)
            p.sub_(m.sign() if self.settings.signs else m, alpha=group["lr"] * self.settings.more.get("gain", 1.0))
            p.sub_(g, alpha=group["lr"] * p.options["rate"] * (2 if p.role == "head" else 1))

    settings = Settings()
    params: list[Any] = world.params
    for i, p in enumerate(params):
        p.role, p.options = ("head" if i == 2 else "body"), {"rate": 1.0 + i}
    params[0]._no_decay = True
    world.compile(Configured(world.params, settings))
    world.step(10)
    settings.beta, params[0]._no_decay = 0.5, False
    world.step(10)
    settings.signs, params[2].options["rate"] = True, 0.25
    world.step(10)
    settings.signs, settings.more["gain"] = False, 3.0
    world.step(10)


# --- closures and arguments -------------------------------------------------------------------------------------------


class Closed(Ball):
    """Calls its closure first, and goes by the loss, which it compares with the one before."""

    last = math.inf

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0, skip: int = -1) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            for group in self.param_groups:
                group["lr"] *= 1.05 if float(loss) < self.last else 0.5
            self.last = float(loss)
        self.scale, self.skip = scale, skip
        super().step()
        return loss

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if p.ndim > self.skip:
            p.sub_(g, alpha=group["lr"] * self.scale * (1 + min(self.last, 2.0)))


@case
def closures_and_arguments(world: World) -> None:
    """Gradients are only made by the closure, whose loss is returned; other steps have none, or other arguments."""
    world.compile(Closed(world.params))

    def closure() -> torch.Tensor:
        world.backward()
        return torch.tensor(math.sin(world.taken) / (1 + world.taken))

    for i in range(20):
        world.taken += 1
        world.notes.append(float(world.optimizer.step(closure)))
        world.backward()
        world.notes.append(world.optimizer.step(scale=1 + i / 8, skip=i % 2))


@case
def a_closure_changes_the_rate(world: World) -> None:
    """Of a class of torch's own."""
    optimizer = world.compile(AdamW(world.params, lr=1e-2))

    def closure() -> torch.Tensor:
        world.backward()
        optimizer.param_groups[0]["lr"] *= 0.95
        return torch.tensor(1.0)

    for _ in range(20):
        world.taken += 1
        optimizer.step(closure)


@case
def two_optimizers_share_the_parameters(world: World) -> None:
    first, second = world.compile(AdamW(world.params, lr=1e-2)), world.compile(SGD(world.params, lr=1e-2))
    for i in range(40):
        world.optimizer = (first, second)[i % 2]
        world.step(1)
