"""Training on the device `neuron` beside the same training on the CPU, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron

SHAPES = ((40, 9), (300,), (129,), ())

Make = Callable[[list[torch.nn.Parameter]], Optimizer]


def parameters(device: torch.device | str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=g).bfloat16().to(device)) for s in shapes]


def gradients(shapes: Sequence[tuple[int, ...]], seed: int) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(seed)
    yield from (torch.randn(s, generator=g).bfloat16() for s in shapes)


def step(optimizer: Optimizer, seed: int, closure: Any = None) -> None:
    params = of(optimizer)
    for p, grad in zip(params, gradients([tuple(p.shape) for p in params], seed), strict=True):
        p.grad = grad.to(p.device)
    optimizer.step(*([closure] if closure else []))


def of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def trained(make: Make, device: torch.device | str, steps: int = 4, **options: Any) -> Optimizer:
    """An optimizer after some steps with a learning rate that changes."""
    optimizer = collage_neuron.compile(make(parameters(device)), **options)
    for i in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9
        step(optimizer, i)
    return optimizer


def words(optimizer: Optimizer) -> list[Tensor]:
    """All tensors of parameters and states, on the host."""
    found = []
    for p in of(optimizer):
        found += [p.detach(), *(x for _, x in sorted(optimizer.state[p].items()) if isinstance(x, Tensor))]
    return [x.cpu() for x in found]


def differing(found: Optimizer, wanted: Optimizer) -> list[int]:
    """The indices of the words that are not the same bits."""
    pairs = zip(words(found), words(wanted), strict=True)
    return [i for i, (x, y) in enumerate(pairs) if x.dtype != y.dtype or not torch.equal(_bits(x), _bits(y))]


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)
