"""Several GPTs that train side by side as one batched computation, each with its own weights and data.

Weights and gradients are bf16, and what is computed between them is fp32: a CPU without bf16 instructions multiplies
bf16 matrices ten times as slowly, and it is the optimizer's roundings that are studied.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from gpt import GPT, Shape
from text_data import batches
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import Parameter
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from study.reduced import reduce_linears

WARM_UP = 0.05
"""The part of a run in which the learning rate rises, before it falls along a cosine."""

FLOOR = 0.1
"""What of the peak is left at the end, as in the papers' runs: at less than that even fp32 loses its updates."""


@dataclass(frozen=True)
class Group:
    """Runs with one learning rate that differ in their seed, that of the first weights and of the data's order."""

    lr: float
    seeds: tuple[int, ...]


class Ensemble:
    """The weights of all runs, and the losses of all as one tensor of shape [runs]; a group's runs lie together.

    `params[i]` are the parameters of group i by name, each of shape [seeds, ...]: an elementwise optimizer does to each
    seed what it would do to it alone.
    """

    def __init__(self, shape: Shape, groups: Sequence[Group], reduced: tuple[int, str] | None = None) -> None:
        self.shape, self.groups = shape, groups
        self.params = [_stacked(shape, group.seeds) for group in groups]
        self.model = GPT(shape).to("meta")
        if reduced:
            reduce_linears(self.model, *reduced)

    @property
    def seeds(self) -> list[int]:
        """The seed of each run."""
        return [seed for group in self.groups for seed in group.seeds]

    def logits(self, tokens: Tensor) -> Tensor:
        """[runs, batch, time, vocab] from int64 [runs, batch, time]."""
        weights = {name: torch.cat([p[name].float() for p in self.params]) for name in self.params[0]}
        with sdpa_kernel(SDPBackend.MATH):  # the one that vmap knows how to batch
            return vmap(lambda w, x: functional_call(self.model, w, (x,)))(weights, tokens)  # type: ignore[no-any-return]

    def losses(self, batch: Tensor) -> Tensor:
        """The mean cross-entropy of each run, in nats per byte, on int64 [runs, batch, time + 1]."""
        logits, target = self.logits(batch[:, :, :-1]), batch[:, :, 1:]
        loss = F.cross_entropy(logits.flatten(0, 2), target.flatten(), reduction="none")
        each: Tensor = loss.unflatten(0, target.shape).mean((1, 2))
        return each

    def feed(self, text: Tensor) -> Iterator[Tensor]:
        """Endless batches of shape [runs, batch, time + 1]; runs with the same seed see the same ones."""
        streams = {seed: batches(text, self.shape, seed) for seed in self.seeds}
        while True:
            drawn = {seed: next(stream) for seed, stream in streams.items()}
            yield torch.stack([drawn[seed] for seed in self.seeds])

    def held_out(self, text: Tensor, count: int) -> list[Tensor]:
        """So many batches of other text, the same for every run."""
        stream = batches(text, self.shape, seed=0)
        return [next(stream).expand(len(self.seeds), -1, -1) for _ in range(count)]

    @torch.no_grad()
    def validate(self, held_out: Sequence[Tensor]) -> Tensor:
        """The mean loss of each run."""
        return torch.stack([self.losses(batch) for batch in held_out]).mean(0)


def _stacked(shape: Shape, seeds: Sequence[int]) -> dict[str, Parameter]:
    models = []
    for seed in seeds:
        torch.manual_seed(seed)
        models.append(dict(GPT(shape).named_parameters()))
    return {name: Parameter(torch.stack([m[name].detach() for m in models])) for name in models[0]}


def schedule(steps: int) -> Callable[[int], float]:
    """The learning rate of a step as a fraction of its peak: up along a line, then down along a cosine."""
    rise = max(1, round(steps * WARM_UP))

    def factor(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))

    return factor
