"""Parameters that are sharded over processes: which processes have parts, and what they tell one another.

What each tells is gathered, in the order of the processes, so that all get the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collage_neuron import torch_privates
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


def why_not(p: Any) -> str | None:
    """Why the parts of a DTensor cannot be added up, as a clause; None if they can."""
    if any(not (x.is_shard() or x.is_replicate()) for x in p.placements):
        return f"its placements are {tuple(p.placements)}, and only Shard and Replicate are known"
    if p.device.type != "cpu" or p.device_mesh.device_type != "cpu":
        where = f"on {p.device}, in a mesh of type {p.device_mesh.device_type!r}"
        return f"it is {where}, and sums of shards are tried on CPUs only"
    return None


def groups_of(p: Any) -> tuple[Between, ...]:
    """The groups of processes over which `p` is sharded, in the order of its mesh: replicas have the same elements."""
    return _between(p, [i for i, x in enumerate(p.placements) if not x.is_replicate()]) if is_sharded(p) else ()


def mesh_of(p: Any) -> tuple[Between, ...]:
    """The groups that together are all processes of the mesh of `p`, those of its replicas too."""
    return _between(p, range(p.device_mesh.ndim)) if is_sharded(p) else ()


def _between(p: Any, dims: Iterable[int]) -> tuple[Between, ...]:
    mesh = p.device_mesh
    return tuple(Between(mesh.get_group(i)) for i in dims if mesh.size(i) > 1)


def sample(x: Any, most: int) -> Tensor:
    """Up to twice as many elements of a DTensor, some of each process's part, the same in each: fp32, on the CPU."""
    groups = groups_of(x)
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
