"""Loops, and classes that are more than an update: closures, hooks, groups, copies, checkpoints, code that changes."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import logging
import math
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from hostile import Ball, Base, World, case, hostile, of_both
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


@case
def schedules(world: World) -> None:
    """Made before the line, one of them wraps the step; another one is made after it."""
    optimizer = SGD(world.params, lr=1e-2, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=40)
    world.compile(optimizer)
    decay = torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda n: 0.5 if n % 2 else 1.0)
    for i in range(39):
        world.step(1)
        (cycle if i < 30 else decay).step()


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


# --- gradients --------------------------------------------------------------------------------------------------------


@of_both
def gradients_come_and_go(world: World, cls: Any) -> None:
    world.compile(cls(world.params, lr=1e-2))
    for i in range(20):
        world.step(1, without=((0, 1, 2), (0, 1), (0,), (), (1, 2), (2,))[min(i, i % 5 + 1)])


@case
def gradients_that_are_added_up(world: World) -> None:
    """Four backward passes add in place; the loop zeroes in place."""
    world.compile(Ball(world.params))
    for _ in range(10):
        for _ in range(4):
            world.backward(adds=True)
            world.taken += 1
        world.optimizer.step()
        world.optimizer.zero_grad(set_to_none=False)


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


@case
def gradients_in_one_tensor(world: World) -> None:
    """The loop writes into the same tensor, which the step keeps: it is always the gradient itself."""

    class Keeps(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g + 0.5 * (g - state.setdefault("before", g)), alpha=group["lr"])

    world.compile(Keeps(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.copy_(world.gradient(i, world.taken))
        world.taken += 1
        world.optimizer.step()


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


@case
def elements_that_are_no_numbers(world: World) -> None:
    """NaN and infinity in gradients are left out by the update; weights and rates of 2**100 and 2**-60."""

    class Guards(Ball):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            super().update(p, torch.where(g.abs() < 1e4, g, torch.zeros_like(g)), state, group)

    scales = (2.0**100, 2.0**-60, 1.0)
    world.params = [Parameter(p.detach() * scale) for p, scale in zip(world.params, scales, strict=True)]
    world.compile(Guards([{"params": [p], "lr": 0.01 * s} for p, s in zip(world.params, scales, strict=True)]))
    for i in range(20):
        world.backward()
        world.taken += 1
        for p in world.params if i % 5 == 0 else ():
            assert p.grad is not None
            p.grad[0], p.grad[1] = math.nan, math.inf
        world.optimizer.step()
    world.start = [x / s for x, s in zip(world.start, scales, strict=True)]
    values = world.values()
    world.values = lambda: [v / s for v, s in zip(values, scales, strict=True)]  # type: ignore[method-assign]


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
def idle_makes_states(p: Any, g: Any, state: Any, group: Any, lr: float) -> None:
    """Before it looks at the gradient; one of them is what the parameter was then."""
    if not state:
        state.update(step=0, m=torch.zeros_like(p), z=p.detach().clone())
    if g is not None:
        state["step"] += 1
        p.add_(state["m"].lerp_(g, 0.5), alpha=-lr / state["step"]).sub_(p - state["z"], alpha=0.1)


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


@case
def code_is_exchanged(world: World) -> None:
    """A rule that is an attribute of the class, then the method, then the step of the object, which takes two."""

    class Ruled(Base):
        rule: Any = functools.partial(lambda p, g, rate: p.sub_(g, alpha=rate), rate=0.01)

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            type(self).rule(p, g)

    optimizer = Ruled(world.params)
    world.compile(optimizer)
    world.step(5)
    Ruled.rule = functools.partial(lambda p, g, rate: p.sub_(g, alpha=rate), rate=0.03)
    world.step(5)
    Ruled.rule = lambda p, g: p.sub_(g.sign(), alpha=0.01)
    world.step(5)
    Ruled.update = lambda self, p, g, state, group: p.add_(g, alpha=0.002)  # type: ignore[method-assign]
    world.step(5)
    world.optimizer.update = types.MethodType(lambda self, p, g, state, group: p.mul_(0.9), world.optimizer)
    world.step(5)
    step = world.optimizer.step
    world.optimizer.step = lambda: (step(), step())
    world.step(5)
    del world.optimizer.step


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


# --- classes ----------------------------------------------------------------------------------------------------------


@case
def modes_and_methods_of_its_own(world: World) -> None:
    """Switched from outside; groups, checkpoints and gradients go through methods that are overridden."""

    class Own(Base):
        training = True

        def eval(self) -> None:
            self.training = False

        def train(self) -> None:
            self.training = True

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            param_group.setdefault("gain", 0.5 + len(self.param_groups))
            super().add_param_group(param_group)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "more"})

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            average = state.setdefault("average", p.detach().clone())
            if self.training:
                p.sub_(g, alpha=group["lr"] * group["gain"])
            else:
                p.lerp_(average, 0.5)
            average.lerp_(p, 0.1)

    optimizer = world.compile(Own(world.params))
    for _ in range(3):
        world.step(5)
        optimizer.eval()
        world.step(2)
        optimizer.train()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    world.step(5)
    optimizer.training = False
    world.step(3)


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


class Decays:
    """A mixin that decays after whatever comes next."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)  # type: ignore[misc]
        for group in self.param_groups:  # type: ignore[attr-defined]
            for p in group["params"]:
                p.mul_(1 - 0.5 * group["lr"])
        return result


class Clips:
    """One that clips gradients, in place, and sets the rate for the time of a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups  # type: ignore[attr-defined]
        kept = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] /= 2
            for p in group["params"]:
                p.grad.clamp_(-1, 1)
        try:
            return super().step(closure)  # type: ignore[misc]
        finally:
            for group, lr in zip(groups, kept, strict=True):
                group["lr"] = lr


class Mixed(Decays, Clips, Adam):
    """Three steps in one."""


@case
def a_step_around_torchs_own(world: World) -> None:
    world.compile(Mixed(world.params, lr=1e-2))
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


@hostile
class ByExactClassOfTorch(Base):
    """The same where all parameters are torch's."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * (1 if type(p) is Parameter else 0.1))


LOG = logging.getLogger(__name__)


@case
def records_of_a_log_are_counted(world: World) -> None:
    class Counts(logging.Handler):
        seen = 0

        def emit(self, record: logging.LogRecord) -> None:
            self.seen += 1

    class Logs(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            LOG.critical("an update")
            p.sub_(g, alpha=group["lr"] / handler.seen)

    handler, disabled = Counts(), logging.root.manager.disable
    LOG.addHandler(handler)
    LOG.propagate = False
    logging.disable(logging.NOTSET)
    try:
        world.compile(Logs(world.params))
        world.step(10)
    finally:
        LOG.removeHandler(handler)
        logging.disable(disabled)
    world.notes.append(handler.seen)


# --- what is rejected, or told: plain torch's behaviour cannot be had -------------------------------------------------

REJECTED = {
    "weights_in_one_memory": r"shares its memory with another parameter",
    "views_of_a_flat_buffer": r"shares its memory with a tensor of shape .*, of which it is a view",
    "a_step_that_was_replaced": r"optimizer.step of this Ball was replaced by hand",
    "NamesOfLowWords": r"a state called 'm_lo'",
    "NamesOfMasters": r"a state called 'param_master'",
    "StateIsAnObject": r"keeps an object of type SimpleNamespace as optimizer.state\[p\]; keep a dictionary",
}
WARNED = {"two_optimizers_share_the_parameters", "a_hook_decays_the_weights"}


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
def two_optimizers_share_the_parameters(world: World) -> None:
    first, second = world.compile(AdamW(world.params, lr=1e-2)), world.compile(SGD(world.params, lr=1e-2))
    for i in range(40):
        world.optimizer = (first, second)[i % 2]
        world.step(1)


@case
def a_hook_decays_the_weights(world: World) -> None:
    """By 1e-3 a step, written to the weights after each step: in bf16 it rounds away."""
    optimizer = world.compile(SGD(world.params, lr=1e-3))

    def decay(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list[torch.Tensor](world.params), 1 - 1e-3)

    optimizer.register_step_post_hook(decay)
    world.step()
