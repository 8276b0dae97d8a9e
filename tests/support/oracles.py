"""What numerical claims are measured against: AdamW in float64, gradient streams, error measures.

`Driver` steps the rewritten update without the optimizer around it, many settings in one call: 2000 steps of the
reference backend are then a matter of seconds. The tests show that it takes the steps of the compiled optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from planned import plan_update
from sampling import WHOLE
from torch import Tensor

import collage_neuron
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends import reference
from collage_neuron.runtime import step_plan
from collage_neuron.settings import GroupNumbers
from collage_neuron.trace.recorded_classes import follow, settings_of

STEPS = 2000
ELEMENTS = 4096 if WHOLE else 512


class Moments64(NamedTuple):
    """The state of AdamW in float64, in the letters of the paper."""

    theta: Tensor
    m: Tensor
    v: Tensor


def adamw64(
    s: Moments64, g: Tensor, t: int, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float | Tensor
) -> Moments64:
    """One step of AdamW (Loshchilov and Hutter, 2019, as torch.optim writes it) on float64 tensors; t counts from 1."""
    beta1, beta2 = betas
    g = g.double()
    m = beta1 * s.m + (1 - beta1) * g
    v = beta2 * s.v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    theta = s.theta - lr * weight_decay * s.theta - lr * m_hat / (v_hat.sqrt() + eps)
    return Moments64(theta, m, v)


def start64(theta: Tensor) -> Moments64:
    """Moments of zero beside `theta`."""
    return Moments64(theta.double(), torch.zeros_like(theta, dtype=torch.float64), torch.zeros_like(theta).double())


SQUARE_STREAMS = ("constant", "random", "decaying")
"""Gradients for the second moment; `decaying` shrinks 100-fold over the run."""


def square_streams() -> Iterator[Tensor]:
    """bf16 gradients of shape (3, ELEMENTS), one row a stream of SQUARE_STREAMS, for each of STEPS steps."""
    generator = torch.Generator().manual_seed(0)
    constant = torch.full((ELEMENTS,), 1e-3)
    for step in range(STEPS):
        random, decaying = torch.randn(2, ELEMENTS, generator=generator) * 1e-3
        yield torch.stack([constant, random, decaying * 0.01 ** (step / STEPS)]).bfloat16()


MEAN_TO_NOISE = {
    "pure drift": (1.0, 0.0),
    "drift": (0.5, 1.0),
    "weak drift": (0.1, 1.0),
    "pure noise": (0.0, 1.0),
    "no gradient": (0.0, 0.0),
}
DRIFT_STREAMS = tuple(MEAN_TO_NOISE)
"""Gradients for the weights: for each element a mean of random sign under Gaussian noise, as multiples of 1e-3."""


def drift_streams() -> Iterator[Tensor]:
    """bf16 gradients of shape (5, ELEMENTS), one row a stream of DRIFT_STREAMS, for each of STEPS steps."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(ELEMENTS, generator=generator).sign()
    weights = torch.tensor(list(MEAN_TO_NOISE.values()))[:, :, None] * 1e-3
    for _ in range(STEPS):
        yield (weights * torch.stack([mean, torch.randn(ELEMENTS, generator=generator)])).sum(1).bfloat16()


def initial_weights(streams: int) -> Tensor:
    """theta ~ N(0, 0.02) as bf16 numbers, the same for every stream."""
    theta = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(2)) * 0.02
    return theta.bfloat16().repeat(streams, 1)


def bias(x: Tensor, exact: Tensor) -> Tensor:
    """|mean((x - exact) / exact)| over the elements (last dimension): what the issue calls mean relative error."""
    return ((x - exact) / exact).mean(-1).abs()


def spread(x: Tensor, exact: Tensor) -> Tensor:
    """mean(|x - exact| / exact): as `bias`, but errors of different elements cannot cancel."""
    return ((x - exact) / exact).abs().mean(-1)


def distance_error(x: Tensor, exact: Tensor, start: Tensor) -> Tensor:
    """||x - exact|| / ||exact - start||, rows apart: the error as a fraction of the distance travelled."""
    error: Tensor = (x - exact).norm(dim=-1) / (exact - start).norm(dim=-1)
    return error


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch on one thread: tensors of some ten thousand elements lose by sharing, ten-fold on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def hoeffding(n: int, chance: float = 1e-9) -> float:
    """What the mean of n independent numbers within an interval of length 1 is off by with less than this chance."""
    return math.sqrt(math.log(2 / chance) / (2 * n))


class Setting(NamedTuple):
    """Hyper-parameters of AdamW that the claims are made for."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.1


def _plan(strategy: StrategyLike, arithmetic: str, setting: Setting, steps_taken: int) -> step_plan.Job:
    """The plan of the compiled AdamW's next step after `steps_taken` steps."""
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer = collage_neuron.compile(
        torch.optim.AdamW([p], **setting._asdict()), strategy=strategy, arithmetic=arithmetic
    )
    optimizer.step()
    optimizer.state[p]["step"].fill_(steps_taken)
    return plan_update(torch.optim.AdamW, optimizer, optimizer.param_groups[0], [p])


def slots_of(setting: Setting, steps: range) -> list[list[float]]:
    """The numbers that AdamW's update uses in each of `steps` (counted from 1).

    Its own code runs once; with other counts, what it has computed is computed again
    (tests/trace/test_number_tape.py).
    """
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer = collage_neuron.compile(torch.optim.AdamW([p], **setting._asdict()))
    optimizer.step()
    (group,) = optimizer.param_groups
    recording = plan_update(torch.optim.AdamW, optimizer, group, [p]).recording
    known = follow(torch.optim.AdamW, optimizer, group, p, recording)
    assert known is not None
    numbers = GroupNumbers(group, settings_of(torch.optim.AdamW)).numbers
    found = [known.again([*numbers, torch.tensor(float(t - 1))]) for t in steps]
    return [again.slots for again in found if again]


def decay_slots(setting: Setting, steps: int = STEPS) -> list[tuple[list[float], list[float]]]:
    """The numbers of each step with weight decay and without, which differ in one slot, the same in every step.

    1 - lr * 1e-300 is 1: no decay, through the same graph (AdamW leaves the factor out where weight_decay is 0).
    """
    decayed = slots_of(setting, range(1, steps + 1))
    kept = slots_of(setting._replace(weight_decay=1e-300), range(1, 2))[0]
    changed = [k != d for k, d in zip(kept, decayed[0], strict=True)]
    assert sum(changed) == 1
    return [(s, [k if c else x for k, x, c in zip(kept, s, changed, strict=True)]) for s in decayed]


class Driver:
    """The rewritten AdamW of one strategy on the reference backend; settings that share a step are stacked.

    Components have shape (settings, streams, ELEMENTS); entry i of the scalar vector becomes a (settings, 1, 1)
    tensor, so that one call of the update steps every setting with its own numbers.
    """

    def __init__(self, theta: Tensor, strategy: StrategyLike, arithmetic: str) -> None:
        self.update = _plan(strategy, arithmetic, Setting(), 1).update
        self.components: dict[str, Tensor] = {}
        self._taken = 0
        for name, fmt in self.update.formats.items():
            value = theta.float() if name == "param" else torch.zeros_like(theta, dtype=torch.float32)
            self.components.update(zip(fmt.keys(name), fmt.encode(value), strict=True))

    def step(self, g: Tensor, slots: Sequence[Sequence[float]]) -> None:
        """One step with the gradient g and the slots of each setting."""
        drawing = (0, self._taken, 0, 0)  # seed, step, parameter, first element, for strategies that store by chance
        self._taken += 1
        vector = torch.tensor([self.update.scalars.run(s, drawing) for s in slots], dtype=torch.float32)
        self.components["grad"] = g
        inputs = [self.components[key] for key in self.update.inputs]
        results = reference.BACKEND.lowered(self.update)(inputs, vector.T[:, :, None, None])
        self.components.update(zip(self.update.outputs, results, strict=True))

    def value(self, name: str) -> Tensor:
        """The parameter (`param`) or a state in float64, from its components."""
        fmt = self.update.formats[name]
        value: Tensor = fmt.decode([self.components[key] for key in fmt.keys(name)])
        return value.double()
