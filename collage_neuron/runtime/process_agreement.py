"""Processes that have parts or replicas of parameters: what they tell one another, and that they take the same step.

What each tells is gathered, in the order of the processes, so that all get the same answer.

They must take the same step, or each would wait for the others, and they cannot be trusted to: a parameter may have a
gradient in one process only. So before anything is changed, they compare what they are about to do: a step is launched
by all of them, or runs as written in all, or all raise. Replicas take part (HSDP): if one raised alone, the others
would take the step, and have other weights from then on.

All that share parameters skip a step (`nonfinite`), or none does. Each sees the gradients of its own shards alone. So
the decisions are summed on the device, over every process group among which a parameter is sharded; processes without
shards, or without gradients, take part. Nothing is needed where all processes have equal gradients (DDP), or where
there is one program (SPMD).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.numerics.reductions import gathered
from collage_neuron.runtime import wrappers
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_distributed, is_sharded


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
    return gathered(Between(torch_privates.process_group(name)).gathered(x), how)


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


_DIFFERENT = -1  # what a process tells that knows of a difference already: no checksum is negative

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


# --- a step that is skipped -------------------------------------------------------------------------------------------


Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over a process group, in place."""


def agreed_mask(optimizer: Optimizer, params: Sequence[Any], finite: torch.Tensor) -> torch.Tensor:
    """The common decision to take a step, a 0-d mask: true if `finite` is in all processes that share `params`.

    Raises:
        ValueError: the parameters were split by a library that does not tell its process groups.
    """
    reductions = _reductions(optimizer, params)
    if not reductions:
        return finite
    found = (~finite).float()  # a sum, as for gradients: not every collective library has a minimum over booleans
    for reduce in reductions:  # one dimension of a mesh after another: together these are all its processes
        reduce(found)
    return found == 0


def _reductions(optimizer: Optimizer, params: Sequence[Any]) -> Sequence[Reduce]:
    ours = bookkeeping(optimizer)
    if ours.reductions is None:  # searches all objects of the process, so only once
        _check_known(params)
        ours.reductions = [*_of_wrapper(optimizer), *_of_flat(params)]
    return [*_of_meshes(params), *ours.reductions]


def _check_known(params: Sequence[Any]) -> None:
    """Raises for parameters that layers of Megatron or neuronx_distributed have split, without DTensors."""
    for p in params if is_distributed() else ():
        if getattr(p, "tensor_model_parallel", False) and not is_sharded(p):
            raise ValueError(
                f"a parameter of shape {list(p.shape)} is split by tensor parallelism (p.tensor_model_parallel), over "
                "processes that only its library knows, and each would skip steps by itself; nothing was updated: use "
                "nonfinite='pass', and leave out steps in the training loop"
            )


def _of_meshes(params: Sequence[Any]) -> list[Reduce]:
    """The reductions for FSDP2, HSDP and tensor parallelism: one per dimension of each mesh, in parameter order."""
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    groups = {mesh.get_group(i): mesh.device_type for mesh in meshes for i in range(mesh.ndim)}
    return [_all_reduce(group, device) for group, device in groups.items()]


def _all_reduce(group: Any, device: str | torch.device | None = None) -> Reduce:
    def reduce(found: torch.Tensor) -> None:
        # Where the group's network is; parameters may be offloaded.
        there = found if device is None else found.to(device)
        torch.distributed.all_reduce(there, group=group)
        found.copy_(there)

    return reduce


def _of_flat(params: Sequence[Any]) -> Iterator[Reduce]:
    """The reductions for FSDP1: over the processes that share a flat parameter."""
    if not any(map(torch_privates.is_flattened, params)):
        return
    held = set(params)
    handles = wrappers.instances(*torch_privates.FSDP1)
    own = [h for h in handles if not held.isdisjoint(torch_privates.of_flat_parameter(h))]
    yield from (_all_reduce(group, device) for group, device in {h.process_group: h.device for h in own}.items())


def _of_wrapper(optimizer: Optimizer) -> Iterator[Reduce]:
    """The reductions for ZeRO-1 of torch and torch_xla, where each process has other parameters or shards."""
    of_torch = "torch.distributed.optim.zero_redundancy_optimizer"
    for zero in wrappers.instances(of_torch, "ZeroRedundancyOptimizer") if is_distributed() else ():
        if vars(zero).get("optim") is optimizer:
            yield _all_reduce(zero.process_group, torch_privates.device_of_zero(zero))
    for zero in wrappers.zero_of_xla(optimizer):
        yield from (partial(_all_reduce_of_xla, zero, groups) for groups in torch_privates.groups_of_xla_zero(zero))


def _all_reduce_of_xla(zero: Any, groups: Any, found: torch.Tensor) -> None:
    import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device

    xm.all_reduce(xm.REDUCE_SUM, [found], groups=groups, pin_layout=zero.pin_layout)
