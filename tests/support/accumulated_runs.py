"""What the processes of `worlds` run for `test_accumulation`: gradients summed in fp32 under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sharded_runs import Whole, adamw, model_of, parameters_of, refusal, shard, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from wrapped_runs import STEPS, backward, batch

import collage_neuron

MICROSTEPS = 8


def trained(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Whole:
    """All microsteps but the last in `no_sync`."""
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step != 1)
        for i in range(MICROSTEPS - 1):
            with ddp.no_sync():
                backward(ddp, batch(10 * step + i, dist.get_rank()))
            assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {torch.float32}
        backward(ddp, batch(10 * step + MICROSTEPS, dist.get_rank()))
        assert {p.grad.dtype for p in ddp.parameters() if p.grad is not None} == {torch.bfloat16}
        optimizer.step()
    return whole(optimizer)


def with_ddp(wrap_first: bool, **options: Any) -> Whole:
    """The hooks are there before DDP, or after it; the line comes first or last in the same way."""
    model: nn.Module = model_of(0)
    optimizer = adamw(model)
    if wrap_first:
        model = DistributedDataParallel(model, **options)
    collage_neuron.compile(model, optimizer)
    collage_neuron.accumulate_in_fp32(model)
    ddp = (
        model
        if isinstance(model, DistributedDataParallel)
        else DistributedDataParallel(model, init_sync=False, **options)
    )
    return trained(ddp, optimizer)


def by_hand() -> Whole:
    """Sums in fp32, rounded once, and then averaged as DDP does."""
    model = model_of(0)
    model, optimizer = collage_neuron.compile(model, adamw(model))
    for step in range(STEPS):
        total = {p: torch.zeros_like(p, dtype=torch.float32) for p in parameters_of(optimizer)}
        for i in [*range(MICROSTEPS - 1), MICROSTEPS]:
            model.zero_grad()
            backward(model, batch(10 * step + i, dist.get_rank()))
            for p, t in total.items():
                assert p.grad is not None
                t += p.grad
        for p, t in total.items():
            p.grad = t.to(p.dtype) / dist.get_world_size()
            dist.all_reduce(p.grad)
        optimizer.step()
    return whole(optimizer)


RUNS: dict[str, Callable[[], Whole]] = {
    "DDP last": partial(with_ddp, wrap_first=False),
    "DDP first": partial(with_ddp, wrap_first=True),
    "views of buckets": partial(with_ddp, wrap_first=True, gradient_as_bucket_view=True),
}


REJECTED = ("find_unused_parameters", "static_graph")
"""Options of DDP."""


def under_ddp() -> tuple[Whole, dict[str, Whole], dict[str, str]]:
    """All bits by hand and of each run, and what is said of models that are rejected."""
    said = {name: refusal(partial(with_ddp, wrap_first=True, **{name: True})) for name in REJECTED}
    said["late"] = refusal(partial(with_ddp, wrap_first=False, static_graph=True))
    said["sharded"] = refusal(partial(collage_neuron.accumulate_in_fp32, shard(model_of(0))))
    return by_hand(), {name: run() for name, run in RUNS.items()}, said
