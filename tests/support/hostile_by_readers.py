"""Cases by somebody who knows the code: each aims at something that a recording could miss."""

from __future__ import annotations

import copy
import itertools
import random
import time
from typing import Any

import torch
from hostile import Base, World, case, hostile
from torch.optim import SGD, AdamW

# --- what a recording of one parameter does not show -----------------------------------------------------------


@hostile
class DividesByTheNumberOfParameters(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] / len(group["params"]))


@hostile
class FavoursTheFirst(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] * (2 if p is group["params"][0] else 1))


@hostile
class UsesTheGradientOfItsNeighbour(Base):
    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            ps = self.param_groups[0]["params"]
            ps[0].add_(ps[2].grad, alpha=-0.01)
            ps[2].add_(ps[0].grad, alpha=-0.01)
            ps[1].add_(ps[1].grad, alpha=-0.01)


@hostile
class CountsParameters(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        self.count += 1
        p.add_(g, alpha=-group["lr"] / self.count**0.5)


@hostile
class CountsSteps(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] / self.count**0.5)


@hostile
class SumsTheRatesOfTheOthers(Base):
    """Keeps a number on itself that the last parameter of a step leaves for the first of the next."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rate = 0.01

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-self.rate)
        self.rate = 0.01 if p.dim() == 1 else 0.02


@hostile
class LooksAtTheShape(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] * (p.numel() ** -0.5 if p.dim() > 1 else 1))


@hostile
class KeepsItsOwnList(Base):
    """Iterates over a list of its own and not over the groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = list(self.param_groups[0]["params"])

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for p in self.mine:
                p.add_(p.grad, alpha=-0.01)


@hostile
class KeepsMomentsInADictionary(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.moments = {id(p): torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(self.moments[id(p)].mul_(0.9).add_(g), alpha=-group["lr"])


# --- states that come, go, change places and share memory ------------------------------------------------------


@hostile
class UsesTwoBuffersInTurn(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        buffer = state.setdefault(f"m{t % 2}", torch.zeros_like(p))
        p.add_(buffer.mul_(0.9).add_(g), alpha=-group["lr"])


@hostile
class MakesAStateLate(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        if t == 10:
            state["m"] = g.clone()
        if t > 10:
            state["m"].lerp_(g, 0.1)
        p.add_(state["m"] if t >= 10 else g, alpha=-group["lr"])


@hostile
class DropsAState(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        if t <= 20:
            m = state.setdefault("m", torch.zeros_like(p))
            p.add_(m.mul_(0.9).add_(g), alpha=-group["lr"])
        else:
            state.pop("m", None)
            p.add_(g, alpha=-group["lr"])


@hostile
class SwapsStates(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state.update(a=torch.zeros_like(p), b=torch.zeros_like(p))
        state["a"], state["b"] = state["b"], state["a"]
        p.add_(state["a"].lerp_(g, 0.1), alpha=-group["lr"]).add_(state["b"], alpha=-group["lr"])


@hostile
class KeepsOneTensorTwice(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["a"] = state["b"] = torch.zeros_like(p)
        state["a"].mul_(0.9)
        p.add_(state["b"].add_(g), alpha=-group["lr"])


@hostile
class KeepsTheParameterItself(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        z = state.setdefault("z", p.data)
        z.add_(g, alpha=-group["lr"])


@hostile
class PullsTowardsTheStart(Base):
    """L2-SP: the anchor is a copy of the parameter as it was before the first step, all of its bits."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        anchor = state.setdefault("anchor", p.detach().clone())
        p.add_(g + 10 * (p - anchor), alpha=-group["lr"])


@hostile
class LooksAheadByItself(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        slow = state.setdefault("slow", p.detach().clone())
        t = state["t"] = state.get("t", 0) + 1
        p.add_(g, alpha=-group["lr"])
        if t % 5 == 0:
            p.copy_(slow.lerp_(p, 0.5))


@hostile
class WritesThroughOut(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        torch.mul(m, 0.9, out=m)
        torch.add(m, g, out=m)
        p.data = p.data - group["lr"] * m


@hostile
class WritesAFlatView(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.view(-1).add_(g.reshape(-1), alpha=-group["lr"])


@hostile
class WritesTheFirstRow(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p[0].add_(g[0], alpha=-group["lr"])
        p.add_(g, alpha=-group["lr"])


@hostile
class CountsInIntegers(Base):
    """More than bf16 can count, and the number is used."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = state.setdefault("n", torch.full_like(p, 500, dtype=torch.int32))
        p.add_(g / n.add_(1), alpha=-10.0)


# --- numbers and chance ------------------------------------------------------------------------------------------


@hostile
class DrawsARate(Base):
    def step(self, closure: Any = None) -> Any:
        self.rate = random.Random(len(self.state[self.param_groups[0]["params"][0]])).random()
        return super().step()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        p.add_(g, alpha=-group["lr"] * (1 + 0.1 * self.rate * t))


@hostile
class AddsNoise(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g + torch.randn_like(p), alpha=-group["lr"])


@hostile
class LooksAtTheClock(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"] * (1 + 100 * (time.perf_counter() % 1)))


@hostile
class HasAnIterator(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = itertools.cycle([0.01, 0.03, 0.02])

    def step(self, closure: Any = None) -> Any:
        self.rate = next(self.rates)
        return super().step()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-self.rate)


@hostile
class HasAGenerator(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = (0.01 * (1 + i % 3) for i in itertools.count())

    def step(self, closure: Any = None) -> Any:
        self.rate = next(self.rates)
        return super().step()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-self.rate)


class _Schedule:
    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.calls += 1
        return 0.01 if self.calls <= 40 else 0.1


@hostile
class HasASchedule(Base):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule = _Schedule()

    def step(self, closure: Any = None) -> Any:
        self.rate = self.schedule.next()
        return super().step()

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-self.rate)


# --- gradients ---------------------------------------------------------------------------------------------------


@case
def decays_into_the_gradient_which_nobody_clears(world: World) -> None:
    """The step writes to p.grad, and the next backward adds to what it left there; bf16 holds four of these."""

    class Sgd(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            g.mul_(0.5)
            p.add_(g, alpha=-group["lr"])

    world.compile(Sgd(world.params))
    for i in range(4):
        for j, p in enumerate(world.params):
            new = world.gradient(j, i).mul(4).round().div(4).to(p.dtype)
            p.grad = new if p.grad is None else p.grad.add_(new)
        world.optimizer.step()


@case
def some_parameters_have_no_gradient_now_and_then(world: World) -> None:
    world.compile(AdamW(world.params, lr=1e-2))
    for i in range(20):
        world.step(2, without=(i % 3,))


@case
def a_gradient_is_expanded_or_transposed(world: World) -> None:
    world.compile(SGD(world.params, lr=1e-2, momentum=0.9))
    for i in range(20):
        world.backward()
        p = world.params[0]
        p.grad = p.grad.t().contiguous().t() if i % 2 and p.grad is not None else p.new_ones(1).expand(5, 3)
        world.optimizer.step()


# --- loops -------------------------------------------------------------------------------------------------------


@case
def the_state_is_cleared_to_restart(world: World) -> None:
    """A warm restart: moments go, weights must not."""
    optimizer = world.compile(AdamW(world.params, lr=1e-2))
    for _ in range(3):
        world.step(10)
        optimizer.state.clear()
    world.step(10)


@case
def two_optimizers_share_the_parameters(world: World) -> None:
    first = world.compile(AdamW(world.params, lr=1e-2))
    second = world.compile(SGD(world.params, lr=1e-2))
    for i in range(40):
        world.optimizer = (first, second)[i % 2]
        world.step(1)
    world.optimizer = second


@case
def a_hook_decays_the_weights(world: World) -> None:
    """Decay of 1e-3 a step, written to the weights after each step: in bf16 it rounds away."""
    optimizer = world.compile(SGD(world.params, lr=1e-3))

    def decay(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list[torch.Tensor](world.params), 1 - 1e-3)

    optimizer.register_step_post_hook(decay)
    world.step()


@case
def a_checkpoint_goes_back_in_time(world: World) -> None:
    optimizer = world.compile(AdamW(world.params, lr=1e-2))
    world.step(20)
    saved = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in world.params]
    world.step(20)
    with torch.no_grad():
        for p, old in zip(world.params, saved[1], strict=True):
            p.copy_(old)
    optimizer.load_state_dict(saved[0])
    world.step(20)


@case
def a_group_comes_and_a_parameter_goes(world: World) -> None:
    optimizer = world.compile(AdamW(world.params[:2], lr=1e-2))
    world.step(10, without=(2,))
    if world.strategy is not None:
        world.params[2].data = world.params[2].data.bfloat16()
    optimizer.add_param_group({"params": [world.params[2]], "lr": 2e-2})
    world.step(10)
    del optimizer.param_groups[0]["params"][0]
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    world.step(10)
    optimizer.param_groups[0]["params"].append(world.params[0])
    world.step(10)


@case
def a_copy_takes_over(world: World) -> None:
    world.compile(AdamW(world.params, lr=1e-2))
    world.step(20)
    world.params, world.optimizer = copy.deepcopy((world.params, world.optimizer))
    world.step(20)


@case
def the_closure_changes_the_rate(world: World) -> None:
    optimizer = world.compile(AdamW(world.params, lr=1e-2))

    def closure() -> torch.Tensor:
        world.backward()
        optimizer.param_groups[0]["lr"] *= 0.95
        return torch.tensor(1.0)

    for _ in range(40):
        optimizer.step(closure)
        world.taken += 1


@case
def betas_and_rates_cycle(world: World) -> None:
    optimizer = AdamW(world.params, lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, total_steps=61)
    world.compile(optimizer)
    for _ in range(60):
        world.step(1)
        schedule.step()


@case
def a_rate_is_a_tensor_that_is_filled(world: World) -> None:
    rate = torch.tensor(1e-2)
    world.compile(AdamW(world.params, lr=rate, foreach=False))
    for i in range(40):
        rate.fill_(1e-2 / (1 + i))
        world.step(1)


@case
def a_subclass_of_torchs_adamw_does_more(world: World) -> None:
    class Cautious(AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 1e-3)

    world.compile(Cautious(world.params, lr=1e-2, foreach=False))
    world.step()


@case
def maximize_is_switched(world: World) -> None:
    optimizer = world.compile(AdamW(world.params, lr=1e-2))
    for i in range(4):
        optimizer.param_groups[0]["maximize"] = bool(i % 2)
        world.step(5 + 5 * (i % 2 == 0))
