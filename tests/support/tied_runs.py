"""What the processes of `worlds` run to show what becomes of one weight that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

import collage_neuron

SHAPE = (24, 16)
STEPS = 8

Words = dict[str, Tensor]
"""The bits of a weight and of its states, by name."""


def held(rank: int, first: bool) -> tuple[torch.nn.Parameter, list[torch.nn.Parameter]]:
    """The weight that all ranks hold, and a rank's parameters: it, and others, of other sizes on each rank.

    As in pipeline parallelism, where the first stage holds the embedding and the last one a copy as its output layer;
    with `first` it comes first on every rank, as norms that tensor parallelism duplicates have one place on all.
    """
    g = torch.Generator().manual_seed(0)
    tied = torch.nn.Parameter(torch.randn(SHAPE, generator=g) * 0.02)
    others = [torch.nn.Parameter(torch.randn(3 + rank, 5 + k, generator=g) * 0.02) for k in range(2 + rank)]
    return tied, [tied, *others] if first or rank == 0 else [*others, tied]


def train(rank: int, strategy: str, first: bool) -> Words:
    """The weight after some steps: each rank adds its own gradient, all ranks take the sum."""
    tied, params = held(rank, first)
    with torch.no_grad():
        for p in params:
            p.data = p.data.bfloat16()
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3, weight_decay=0.1), strategy=strategy, verbose=False)
    g = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16()
        assert tied.grad is not None
        dist.all_reduce(tied.grad)
        optimizer.step()
    words = {"param": tied.detach(), **{k: x for k, x in optimizer.state[tied].items() if x.shape == tied.shape}}
    return {k: x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]).clone() for k, x in words.items()}


def all_of_them(cases: Sequence[tuple[str, bool]]) -> dict[tuple[str, bool], Words]:
    """What this rank ends with in each case."""
    return {case: train(dist.get_rank(), *case) for case in cases}
