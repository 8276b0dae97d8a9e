"""What a step depends on besides gradients: other steps, the loss, arguments."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from hostile import Base, World, case, hostile
from torch.utils.weak import WeakTensorKeyDictionary

from strangers.common import eighths, momentum


@case
def switched_from_outside(world: World) -> None:
    """The optimizer has modes, set by methods and attributes from outside, and averages kept for one of them."""

    class Modes(Base):
        training = True

        def eval(self) -> None:
            self.training = False

        def train(self) -> None:
            self.training = True

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            average = state.setdefault("average", p.detach().clone())
            if self.training:
                p.sub_(g, alpha=group["lr"])
            else:
                p.lerp_(average, 0.5)
            average.lerp_(p, 0.1)

    optimizer = world.compile(Modes(world.params))
    for _ in range(4):
        world.step(5)
        optimizer.eval()
        world.step(2)
        optimizer.train()
    optimizer.training = False
    world.step(3)


@case
def zeroed_by_zero_grad_of_step(world: World) -> None:
    """The step ends with `zero_grad(set_to_none=False)`, and the loop only adds."""

    class Tidy(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            self.zero_grad(set_to_none=False)
            return result

    world.compile(Tidy(world.params, lr=1e-2))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@hostile
class FreshStates(Base):
    """All tensors of the state are new ones in each step, and at every third the dictionary is, too."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = state.get("n", 0) + 1
        m = torch.zeros_like(p) if n % 3 == 1 else state["m"]
        self.state[p] = {"n": n, "m": 0.5 * m + g}
        p.sub_(self.state[p]["m"], alpha=group["lr"])


@hostile
class RateOfHead(Base):
    """Rates in a weak dictionary whose keys are parameters; whoever is not in it has the ordinary one."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        params = list(params)
        super().__init__(params, lr)
        self.rates = WeakTensorKeyDictionary({params[2]: 5.0})

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.sub_(g, alpha=group["lr"] * self.rates.get(p, 1.0))


@case
def second_moment_scaled(world: World) -> None:
    """A second moment is scaled down in place between steps, by a power of two, as after a jump of the loss' scale."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    for state in world.optimizer.state.values():
        state["exp_avg"].mul_(2.0**-8)
        state["exp_avg_sq"].mul_(2.0**-16)
    for number in range(30, 40):
        for i, p in enumerate(world.params):
            p.grad = world.gradient(i, number).to(p.dtype) * 2.0**-8
        world.optimizer.step()


@case
def rolled_back(world: World) -> None:
    """After a bad stretch weights, their moments and the rate go back to a checkpoint, held in memory, repeatedly."""
    optimizer: Any = torch.optim.Adam(world.params, lr=1e-2)
    world.compile(optimizer)
    world.step(10)
    buffer = io.BytesIO()
    torch.save([world.optimizer.state_dict(), [p.detach().clone() for p in world.params]], buffer)
    for lr in (0.5, 0.003):
        world.optimizer.param_groups[0]["lr"] = lr
        world.step(5)
        buffer.seek(0)
        state, weights = torch.load(buffer, weights_only=True)
        world.optimizer.load_state_dict(state)
        with torch.no_grad():
            for p, w in zip(world.params, weights, strict=True):
                p.copy_(w)
        world.step(3)


@case
def gradient_is_exchanged_in_step(world: World) -> None:
    """The step gives the parameter another gradient, which is what the loop's next pass adds to."""

    class Exchanges(Base):
        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            p.sub_(g, alpha=group["lr"])
            p.grad = torch.full_like(p, -0.5)

    world.compile(Exchanges(world.params))
    for p in world.params:
        p.grad = torch.zeros_like(p)
    for _ in range(20):
        for i, p in enumerate(world.params):
            assert p.grad is not None
            p.grad.add_(eighths(world, i, world.taken).to(p.dtype))
        world.optimizer.step()
        world.taken += 1


@case
def weight_norm(world: World) -> None:
    """Parameters of a parametrization, and a layer whose weight is computed from two of them."""
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 5))
    world.params = list(layer.parameters())
    world.start = [p.detach().bfloat16().double() for p in world.params]
    with torch.no_grad():
        layer.to(world.dtype)
        for p, s in zip(world.params, world.start, strict=True):
            p.copy_(s)
    world.compile(torch.optim.AdamW(world.params, lr=1e-2))
    world.step(20)


@case
def other_arguments_of_step(world: World) -> None:
    """`step` wants arguments that other steps do not: a scale, and where to begin."""

    class Wants(Base):
        @torch.no_grad()
        def step(self, closure: Any = None, *, scale: float = 1.0, skip: int = 0) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    if p.ndim > skip:
                        p.sub_(p.grad, alpha=group["lr"] * scale)
            return scale

    world.compile(Wants(world.params))
    for i in range(20):
        world.backward()
        assert world.optimizer.step(scale=1 + i / 8, skip=i % 2) == 1 + i / 8
        world.taken += 1


@case
def loss_decides(world: World) -> None:
    """The loss that a closure returned is compared with the one before, and the rate halved: numbers, no tensors."""

    class Bold(Base):
        last = math.inf

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else float(closure())
            if loss is not None:
                for group in self.param_groups:
                    group["lr"] *= 1.05 if loss < self.last else 0.5
                self.last = loss
            super().step()
            return loss

        def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
            momentum(p, g, state, group)

    world.compile(Bold(world.params))
    for i in range(20):

        def closure() -> float:
            world.backward()
            return math.sin(world.taken) / (1 + world.taken)

        assert world.optimizer.step(closure) is not None, i
        world.taken += 1
