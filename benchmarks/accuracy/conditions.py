"""The conditions of the tables: hyper-parameters of AdamW, the weights at the start, and streams of bf16 gradients.

Every condition of PRE_TRAINING but `recipe` differs from it in one respect. All seeds of a condition are stacked along
the first dimension of one tensor; no format shares words across rows, so the runs of different seeds do not influence
each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor

ROWS, COLUMNS = 32, 256
"""The shape of the tensor of one seed."""

WARM_UP = 100

TUNING = (0, 1, 2)
"""Seeds for work on formats; no number of docs/accuracy.md comes from them."""
REPORTED = (100, 101, 102)
"""Seeds for the page and for the tests of the goals."""

Noise = Callable[[Generator], Tensor]
Scales = Callable[[Generator], Tensor]


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, COLUMNS), generator=generator)


def student_t(generator: Generator) -> Tensor:
    """Student's t with two degrees of freedom: z / sqrt(chi2 / 2), where half of chi2 is exponentially distributed."""
    z = normal(generator)
    return z / torch.rand(ROWS, COLUMNS, generator=generator).clamp_min(1e-7).log().neg().sqrt()


def gaussian_and_laplace(generator: Generator) -> Tensor:
    """A quarter of the columns has the Laplace distribution; the length of the whole gradient varies by step."""
    z, flip = normal(generator), torch.rand(ROWS, COLUMNS // 4, generator=generator) - 0.5
    z[:, ::4] = flip.sign() * (1 - 2 * flip.abs()).clamp_min(1e-7).log()
    return z * torch.exp(0.5 * normal(generator, 1))


def nothing(_: Generator) -> Tensor:
    """What an unused row of an embedding, an idle expert or a masked weight gets."""
    return torch.zeros(ROWS, COLUMNS)


def by_element(generator: Generator) -> Tensor:
    """Lognormal scales, one for each element."""
    return torch.exp(normal(generator))


def by_row_and_column(generator: Generator) -> Tensor:
    """The product of a scale for each row and one for each column, lognormal with sigma = 2."""
    rows = torch.exp(2 * normal(generator, ROWS, 1))
    return rows * torch.exp(2 * normal(generator, 1, COLUMNS))


def mostly_by_row(generator: Generator) -> Tensor:
    """Scales that differ between rows more than within one."""
    return torch.exp(1.5 * normal(generator, ROWS, 1) + 0.5 * normal(generator))


@dataclass(frozen=True)
class Condition:
    """AdamW on gradients 1e-3 * scale * (noise + drift * N(0, 1)), where scale and drift are fixed per element."""

    name: str
    what: str = ""
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.1
    steps: int = 2000
    noise: Noise = normal
    scales: Scales = by_element
    drift: float = 0.1
    mean: float = 0.0
    size: float = 0.02
    """Weights start from N(mean, size)."""
    dtype: torch.dtype = torch.bfloat16
    """Of the weights at the start. What a bf16 checkpoint gives has low words of zero; fp32 weights do not."""
    cosine: bool = False

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 0, in a run of `steps` steps."""
        if not self.cosine:
            return self.lr
        warm_up = min(WARM_UP, steps // 10)
        if step < warm_up:
            return self.lr * (step + 1) / warm_up
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


PRE_TRAINING = {
    c.name: c
    for c in (
        Condition("recipe", "learning rate 1e-4, beta2 = .999, weight decay .1, normal gradients, 2000 steps"),
        Condition("t2", "gradients with Student's t distribution, two degrees of freedom", noise=student_t),
        Condition("rows", "scales of gradients by row and column, lognormal with sigma 2", scales=by_row_and_column),
        Condition(".9999", "beta2 = .9999", betas=(0.9, 0.9999)),
        Condition(".95", "beta2 = .95", betas=(0.9, 0.95)),
        Condition("10k", "10 000 steps", steps=10_000),
        Condition("1e-5", "learning rate 1e-5", lr=1e-5),
        Condition("1e-6", "learning rate 1e-6", lr=1e-6),
        Condition("one", "every weight is 1 at the start, as in the gain of a normalization", mean=1.0, size=0.0),
        Condition("cosine", "warm-up over 100 steps, then cosine decay to 0", cosine=True),
        Condition(
            "mixture",
            "normal and Laplace gradients, scales mostly by row, lengths that vary by step, a mean of .3 of the noise",
            noise=gaussian_and_laplace,
            scales=mostly_by_row,
            drift=0.3,
        ),
    )
}
"""By name, in the order of the table's columns. `mixture` was never used while formats were tuned."""

WEIGHTS = {".02": (0.0, 0.02), ".07": (0.0, 0.07), ".3": (0.0, 0.3), "1": (1.0, 0.02)}
"""Mean and size of the weights that are fine-tuned; the last are gains of a normalization."""

_tuned = partial(Condition, betas=(0.9, 0.95), weight_decay=0.0, steps=400, cosine=True, dtype=torch.float32)

FINE_TUNING = {
    c.name: c
    for c in (
        *(
            _tuned(f"{rate}@{weights}", lr=float(rate), mean=mean, size=size)
            for rate in ("6e-7", "2e-6", "1e-5")
            for weights, (mean, size) in WEIGHTS.items()
        ),
        Condition("decay", weight_decay=0.01, steps=1500, noise=nothing, drift=0.0, dtype=torch.float32),
    )
}
"""Small steps on trained weights, without decay; and decay alone, where gradients are zero."""

CONDITIONS = PRE_TRAINING | FINE_TUNING


class Stream:
    """The weights at the start and the gradients of a condition, the same for every contender."""

    def __init__(self, condition: Condition, seeds: Sequence[int]) -> None:
        self.condition = condition
        self._generators = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
        self.start = self._each(self._start).to(condition.dtype)
        self._scale = 1e-3 * self._each(condition.scales)
        self._mean = condition.drift * self._scale * self._each(normal)

    def gradients(self, steps: int) -> Iterator[Tensor]:
        """One bf16 gradient per step; draws from the generators, so it can be asked for once."""
        for _ in range(steps):
            yield (self._scale * self._each(self.condition.noise) + self._mean).bfloat16()

    def _start(self, generator: Generator) -> Tensor:
        mean, size = self.condition.mean, self.condition.size
        return mean + size * normal(generator) if size else torch.full((ROWS, COLUMNS), mean)

    def _each(self, draw: Callable[[Generator], Tensor]) -> Tensor:
        return torch.cat([draw(generator) for generator in self._generators])
