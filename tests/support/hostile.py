"""The arena for code that was written to fool the compiler: each case is played twice, in float64 and compiled.

A case is a function of a `World`. It builds an optimizer over `world.params`, hands it to `world.compile` and takes
steps by `world.step`. In the world of float64 `compile` does nothing, and what comes out is the truth; in the other one
it is the line under test. Either both end at the same weights, within what the formats hold, or the line, or the first
step that could go wrong, raises one of the errors that are sentences.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

TOLERANCES = {"fp32": 1e-4, "full": 2e-3, "plus": 1e-2, "light": 2e-2}
"""How far, of the distance moved, weights may end from float64's.

Derived for steps of 1e-2 on weights of about 0.5, which move about as far: 60 roundings to 24, 17 and (first moments,
which a mean of 8 bits follows within half an ulp) 8 bits. A mistake in what is computed is a multiple of these.
"""

REJECTIONS = (
    UnsupportedUpdate,
    TypeError,
    ValueError,
    collage_neuron.UnsafeEnvironment,
    collage_neuron.TranslationError,
)
"""Errors that say what, where and what to do."""

STEPS = 60


class World:
    """Parameters, gradients that depend on nothing but the number of the step, and a line to compile with."""

    def __init__(self, strategy: str | None, validate: str = "on") -> None:
        generator = torch.Generator().manual_seed(7)
        self.strategy = strategy
        self.dtype = torch.float64 if strategy is None else torch.float32
        self.start = [torch.randn(s, generator=generator).mul(0.5).bfloat16().double() for s in ((5, 3), (7,), (5, 3))]
        self.params = [Parameter(t.to(self.dtype, copy=True)) for t in self.start]
        self.taken = 0
        self.validate = validate
        self.optimizer: Any = None

    def compile(self, optimizer: Optimizer) -> Any:
        """The line; what it returns is also kept, for the weights' exact values."""
        if self.strategy is not None:
            optimizer = collage_neuron.compile(optimizer, strategy=self.strategy, validate=self.validate)
        self.optimizer = optimizer
        return optimizer

    def gradient(self, number: int, step: int) -> Tensor:
        """The gradient of a parameter in a step, exact in bf16: a mean and as much noise."""
        generator = torch.Generator().manual_seed(1000 * step + number)
        shape = self.start[number].shape
        return (torch.randn(shape, generator=generator) + 0.5).bfloat16()

    def backward(self, without: tuple[int, ...] = ()) -> None:
        """Gives every parameter its gradient, but those in `without`."""
        for i, p in enumerate(self.params):
            p.grad = None if i in without else self.gradient(i, self.taken).to(p.dtype)

    def step(self, steps: int = STEPS, without: tuple[int, ...] = ()) -> None:
        """Takes steps with the optimizer compiled last."""
        for _ in range(steps):
            self.backward(without)
            self.optimizer.step()
            self.taken += 1

    def values(self) -> list[Tensor]:
        """The weights, exactly."""
        if self.strategy is None:
            return [p.detach().clone() for p in self.params]
        return [self.exact(p).double() for p in self.params]

    def exact(self, p: Parameter) -> Tensor:
        """The exact value of a parameter."""
        return p.detach() if self.strategy is None else collage_neuron.exact_value(self.optimizer, p)


Case = Callable[[World], None]


class Outcome(NamedTuple):
    """How a case ended in the compiled world."""

    error: float
    """Of the compiled weights, in distances that float64's moved; NaN where the case was rejected."""
    rejection: Exception | None = None
    warned: tuple[str, ...] = ()

    def is_silently_wrong(self, strategy: str) -> bool:
        """Returns True if the weights are off and nobody was told."""
        return not (self.rejection or self.warned or self.error < TOLERANCES[strategy])


def play(case: Case, strategy: str, validate: str = "on") -> Outcome:
    """Plays a case in both worlds and compares the weights."""
    truth, world = World(None), World(strategy, validate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case(truth)
        try:
            case(world)
        except REJECTIONS as rejection:
            return Outcome(float("nan"), rejection)
    pairs = list(zip(world.values(), truth.values(), truth.start, strict=True))
    off = sum(float((x - y).square().sum()) for x, y, _ in pairs) ** 0.5
    far = sum(float((y - s).square().sum()) for _, y, s in pairs) ** 0.5
    return Outcome(off / far, None, tuple(str(w.message) for w in caught if "collage_neuron" in str(w)))


class Base(Optimizer):
    """What the cases build on: a learning rate and a loop."""

    def __init__(self, params: Any, lr: float = 1e-2, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        raise NotImplementedError


CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    """Registers a case by its name; a name is used once."""
    assert f.__name__ not in CASES
    CASES[f.__name__] = f
    return f


def of_class(cls: type[Base], **settings: Any) -> Case:
    """The case of one optimizer, in an ordinary loop."""

    def run(world: World) -> None:
        world.compile(cls(world.params, **settings))
        world.step()

    run.__name__ = cls.__name__
    return run


def hostile(cls: type[Base]) -> type[Base]:
    """Registers an optimizer class as a case."""
    case(of_class(cls))
    return cls


def copied(x: Any) -> Any:
    """A deep copy."""
    return copy.deepcopy(x)
