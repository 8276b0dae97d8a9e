"""The arena for hostile loops: each case is played twice, in plain torch and compiled.

A case is a function of a `World`. It builds an optimizer over `world.params`, hands it to `world.compile` and takes
steps by `world.step`. In plain torch's world `compile` does nothing, and what comes out is the truth.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from as_written import Written
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer
from traced_updates import error, left

import collage_neuron

TOLERANCES = {"fp32": 1e-4, "plus": 1e-2}
"""How far, of the distance moved, weights may end from plain torch's.

Derived for steps of 1e-2 on weights of about 0.5, which move about as far: 60 roundings to 24 bits, and (first moments,
which a mean of 8 bits follows within half an ulp) to 8. A mistake in what is computed is a multiple of these.
"""

STEPS = 60


class World:
    """Parameters, gradients that depend on nothing but the number of the step, and a line to compile with."""

    def __init__(self, strategy: str | None) -> None:
        generator = torch.Generator().manual_seed(7)
        self.strategy = strategy
        shapes = (5, 3), (7,), (5, 3)
        self.params = [Parameter(torch.randn(s, generator=generator).mul(0.5).bfloat16().float()) for s in shapes]
        self.taken = 0
        self.optimizer: Any = None
        self.notes: list[Any] = []
        """What a case notes, which is compared too."""

    def compile(self, optimizer: Optimizer) -> Any:
        """The line; what it returns is also kept, for the weights' exact values."""
        self.start = [p.detach().clone().float() for p in self.params]
        if self.strategy is not None:
            optimizer = collage_neuron.compile(optimizer, strategy=self.strategy, verbose=False)
        self.optimizer = optimizer
        return optimizer

    def gradient(self, number: int, step: int) -> Tensor:
        """The gradient of a parameter in a step, in multiples of 1/8: sums of some are exact in bf16."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        g = torch.randn(self.params[number].shape, generator=generator) + 0.5
        return ((g * 8).round() / 8).to(self.params[number].dtype)

    def backward(self, without: tuple[int, ...] = ()) -> None:
        """Gives every parameter its gradient, but those in `without`."""
        for i, p in enumerate(self.params):
            p.grad = None if i in without else self.gradient(i, self.taken)

    def step(self, steps: int = STEPS, without: tuple[int, ...] = ()) -> None:
        """Takes steps with the optimizer compiled last."""
        for _ in range(steps):
            self.backward(without)
            self.taken += 1
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        """The weights, exactly."""
        if self.strategy is None:
            return [p.detach().clone() for p in self.params]
        return [collage_neuron.exact_value(self.optimizer, p) for p in self.params]


Case = Callable[[World], object]


class Outcome(NamedTuple):
    """How a case ended in the compiled world: the error of weights, in distances that plain torch's moved."""

    error: float
    left: tuple[Any, Any]
    """What was left on the host, in both."""


def play(case: Case, strategy: str) -> Outcome:
    """Plays a case in both worlds and compares what they end with."""
    truth, world = World(None), World(strategy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in (truth, world):
            torch.manual_seed(1)
            case(each)
    ends = [(left(w.optimizer), w.notes) for w in (truth, world)]
    return Outcome(error(world.values(), truth.values(), truth.start), (ends[0], ends[1]))


class Base(Written):
    """What the cases build on: a learning rate and a loop."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, lr, **more)


class Ball(Base):
    """A heavy ball, for cases that are about something else."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if "m" not in state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.9).add_(g)
        p.add_(state["m"], alpha=-group["lr"] * 0.1)


CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    """Registers a case by its name; a name is used once."""
    assert f.__name__ not in CASES
    CASES[f.__name__] = f
    return f


def of_both(loop: Callable[..., object]) -> None:
    """Registers a loop for a class of torch, whose steps are recorded, and for one whose steps are traced."""
    for cls in (AdamW, Ball):
        run: Any = partial(loop, cls=cls)
        run.__name__ = f"{loop.__name__}_{cls.__name__}"
        case(run)


def hostile(cls: Callable[..., Base]) -> Callable[..., Base]:
    """Registers an optimizer class as a case, in an ordinary loop."""

    def run(world: World) -> None:
        world.compile(cls(world.params))
        world.step(20)

    run.__name__ = cls.__name__
    case(run)
    return cls
