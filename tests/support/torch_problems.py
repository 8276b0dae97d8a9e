"""PyTorch's own test inputs for its optimizers, and the problem that it tries them on."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import collage_neuron
from collage_neuron import exact_value

db = pytest.importorskip("torch.testing._internal.common_optimizers", reason="torch.testing needs expecttest")


INFOS = {info.name: info for info in db.optim_db}


CANNOT = {
    "LBFGS": "it evaluates the closure several times a step",
    "Muon": "it orthogonalizes the momentum by matrix products",
    "SparseAdam": "it takes sparse gradients only",
}
"""Optimizers of which no input can run, with the reason. Of all others every input passes every check."""


COVERED = [name for name in INFOS if name not in CANNOT]


Options = dict[str, Any]


def inputs(name: str) -> Iterator[tuple[str, Options]]:
    """The inputs of an optimizer, with their descriptions."""
    for one in INFOS[name].optim_inputs_func("cpu"):
        yield one.desc, one.kwargs


class Problem:
    """torch's problem: the square of an affine map, its 10 x 5 matrix and its bias being the parameters."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(10, 5, 2, generator=generator), torch.randn(10, 2, generator=generator)
        self.params = [Parameter(t.bfloat16()[..., 0].contiguous()) for t in (weight, bias)]
        self.input = torch.randn(5, generator=generator)

    def loss(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (weight.float().mv(self.input) + bias.float()).pow(2).sum()

    def backward(self) -> Tensor:
        for p in self.params:
            p.grad = None
        loss = self.loss(*self.params)
        loss.backward()
        return loss

    def compiled(self, name: str, options: Options, groups: Any = None) -> Optimizer:
        return collage_neuron.compile(self.plain(name, options, groups))

    def plain(self, name: str, options: Options, groups: Any = None) -> Optimizer:
        own = copy.deepcopy(options)  # a scheduler writes into a learning rate that is a tensor
        optimizer: Optimizer = INFOS[name].optim_cls(self.params if groups is None else groups, **own)
        return optimizer

    def train(self, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            optimizer.step()

    def follow(self, optimizer: Optimizer, steps: int, schedulers: Sequence[Any] = ()) -> None:
        """Steps with gradients that do not depend on the weights: numbers of bf16, as large as the problem's."""
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            for p in self.params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))

    def error(self, optimizer: Optimizer, exact: Problem) -> float:
        """The distance to plain fp32, relative to its way, in multiples of what one step may round.

        A step rounds each state in three bytes by 2**-16 of itself at most, and the weight in four by 2**-17.
        """
        start = [p.float() for p in Problem().params]
        rows = zip(self.values(optimizer), exact.params, start, strict=True)
        off, way, size = (
            torch.cat([x.detach().flatten() for x in xs]).norm()
            for xs in zip(*((v - p, p - s, p) for v, p, s in rows), strict=True)
        )
        return float(off / (way * 2**-16 + size * 2**-17))

    def values(self, optimizer: Optimizer) -> list[Tensor]:
        return [exact_value(optimizer, p).clone() for p in self.params]
