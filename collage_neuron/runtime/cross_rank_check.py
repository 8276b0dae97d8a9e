"""Processes that have parts or replicas of parameters: what they tell one another, and that they take the same step.

What each tells is gathered, in the order of the processes, so that all get the same answer.

They must take the same step, or each would wait for the others, and they cannot be trusted to: a parameter may have a
gradient in one process only. So before anything is changed, they compare what they are about to do: a step is launched
by all of them, or runs as written in all, or all raise. Replicas take part (HSDP): if one raised alone, the others
would take the step, and have other weights from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics import tensor_sums
from collage_neuron.states.sharding import is_sharded


@dataclass(frozen=True)
class Between:
    """The processes of a group, equal for the same group."""

    group: Any

    def __len__(self) -> int:
        return int(torch.distributed.get_world_size(self.group))

    def gathered(self, x: Tensor) -> Tensor:
        """The 1-D tensors `x` of all processes, one in each row."""
        rows = x.new_empty(len(self), *x.shape)
        torch.distributed.all_gather_into_tensor(rows.view(-1), x, group=self.group)
        return rows


def across(x: Tensor, how: str, name: str) -> Tensor:
    """1-D fp32 numbers of which each process of the group called `name` has as many, made those of all."""
    return tensor_sums.gathered(Between(torch_privates.process_group(name)).gathered(x), how)


def why_not_summed(p: Any) -> str | None:
    """Why the parts of a DTensor cannot be added up, as a clause; None if they can."""
    if any(not (x.is_shard() or x.is_replicate()) for x in p.placements):
        return f"its placements are {tuple(p.placements)}, and only Shard and Replicate are known"
    if p.device.type != "cpu" or p.device_mesh.device_type != "cpu":
        where = f"on {p.device}, in a mesh of type {p.device_mesh.device_type!r}"
        return f"it is {where}, and sums of shards are tried on CPUs only"
    return None


def mesh_of(p: Any, replicas: bool = True) -> tuple[Between, ...]:
    """The groups that together are all processes of the mesh of `p`; without replicas, which have the same elements."""
    if not is_sharded(p):
        return ()
    mesh, dims = p.device_mesh, [i for i, x in enumerate(p.placements) if replicas or not x.is_replicate()]
    return tuple(Between(mesh.get_group(i)) for i in dims if mesh.size(i) > 1)


def sample_of_dtensor(x: Any, most: int) -> Tensor:
    """Up to twice as many elements of a DTensor, some of each process's part, the same in each: fp32, on the CPU."""
    groups = mesh_of(x, replicas=False)
    of_each = max(1, most // max(1, math.prod(map(len, groups))))
    flat = torch_privates.part(x).detach().reshape(-1)
    own = flat[:: max(1, flat.numel() // of_each)].cpu().float()
    rows = torch.zeros(1, 2, 2 * of_each, dtype=torch.float32, device="cpu")  # values, and which of them there are
    rows[0, 0, : own.numel()], rows[0, 1, : own.numel()] = own, 1.0
    for group in groups:
        rows = group.gathered(rows.reshape(-1)).view(-1, 2, 2 * of_each)
    return rows[:, 0][rows[:, 1] == 1.0]


def ends_in(groups: Sequence[Between], numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The smallest and the largest of each number, below 2**53, that the processes give which share these groups."""
    low = high = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    for group in groups:
        rows = group.gathered(torch.cat([low, high])).view(-1, 2, len(numbers))
        low, high = rows[:, 0].amin(0), rows[:, 1].amax(0)
    return low, high


# --- the same step ----------------------------------------------------------------------------------------------------


_DIFFERENT = -1
"""What a process tells that knows of a difference already: no checksum is negative."""

DIFFERENT = (
    "the processes that have parts or replicas of a parameter are about to take different steps: they must have "
    "gradients of the same parameters, the same settings and the same backend, since their sums (norms, means) are "
    "added up; nothing was updated. Give parameters that a process did not use a gradient of zeros"
)

READS, LAUNCHES, AS_WRITTEN, RAISES = range(4)
"""What a process is about to do with a traced step; it reads values before it knows whether it can launch one."""


def agreed(params: Sequence[Any], given: Sequence[bool], planned: int, sent: object = None) -> int:
    """What all processes do with a step of a class that is traced: as written, if one of them cannot launch it.

    `given` says which parameters have a gradient, and `sent` what is launched, or read, needs of other processes, and
    in which order; None is nothing. What does not need the same would wait for each other: the step runs as written.
    Each process asks once a step, when it knows what is `planned`: before the first operation that needs the others, or
    at the end, and before that if it `READS`. So none waits for one that does not come; and what is stored of a state
    is the same in all.

    Raises:
        ValueError: a process raises, or they have gradients of other parameters and are to run as written.
    """
    told: dict[tuple[Between, ...], list[bool]] = {g: [] for g in map(mesh_of, params) if g}
    for p, has_gradient in zip(params, given, strict=True):
        if groups := mesh_of(p):
            told[groups].append(has_gradient)
    same = True
    for groups, has_gradients in sorted(told.items(), key=lambda item: math.prod(map(len, item[0]))):
        numbers = planned, _checksum(has_gradients) if same else _DIFFERENT, 0 if sent is None else _checksum(sent)
        low, high = ends_in(groups, numbers)
        planned, same = int(high[0]), same and bool(low[1] == high[1])
        if planned <= LAUNCHES and (low[0] != high[0] or low[2] != high[2] or (high[2] and not same)):
            planned = AS_WRITTEN
    if planned == RAISES:
        raise ValueError("another process that has parts or replicas of a parameter rejects this step, or raises in it")
    if planned == AS_WRITTEN and not same:
        raise ValueError(DIFFERENT)
    return planned


def _checksum(x: object) -> int:
    """A number of all that `repr` shows, above 0."""
    return 1 + crc32(repr(x).encode())
