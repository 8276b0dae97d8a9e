"""`nonfinite="skip"` where several processes share parameters: a step is skipped by all of them, or by none.

Each process sees the gradients of its own shards. So the verdicts are added up on the device, over every group of
processes in which a parameter is spread; a process without shards, or without gradients, takes part. What torch leaves
equal in all processes (DistributedDataParallel) needs no word, and SPMD is one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.runtime import wrappers
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_sharded

Reduce = Callable[[torch.Tensor], None]
"""Adds up a tensor over a group of processes, in place."""


def agreed(optimizer: Optimizer, params: Sequence[Any], finite: torch.Tensor) -> torch.Tensor:
    """A 0-d mask like `finite`, the verdict of this process: true if those of all that share `params` are.

    Raises:
        ValueError: only the library that split the parameters knows over which processes.
    """
    reductions = _reductions(optimizer, params)
    if not reductions:
        return finite
    found = (~finite).float()  # added up, as gradients are: not every network has the minimum of bits
    for reduce in reductions:
        reduce(found)
    return found == 0


def _reductions(optimizer: Optimizer, params: Sequence[Any]) -> Sequence[Reduce]:
    ours = bookkeeping(optimizer)
    if ours.reductions is None:  # looks through all objects of the process: once
        _check_known(params)
        ours.reductions = [*_of_wrapper(optimizer), *_of_flat(params)]
    return [*_of_meshes(params), *ours.reductions]


def _check_known(params: Sequence[Any]) -> None:
    """Raises for parameters that Megatron's or neuronx_distributed's layers have split, and that are no DTensors."""
    for p in params if wrappers.is_distributed() else ():
        if getattr(p, "tensor_model_parallel", False) and not is_sharded(p):
            raise ValueError(
                f"a parameter of shape {list(p.shape)} is split by tensor parallelism (p.tensor_model_parallel), over "
                "processes that only its library knows, and each would skip steps by itself; nothing was updated: use "
                "nonfinite='pass', and leave out steps in the training loop"
            )


def _of_meshes(params: Sequence[Any]) -> list[Reduce]:
    """FSDP2, HSDP, tensor parallelism: each dimension of each mesh, in the order of the parameters."""
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    groups = {mesh.get_group(i): mesh.device_type for mesh in meshes for i in range(mesh.ndim)}
    return [_over(group, device) for group, device in groups.items()]


def _over(group: Any, device: str | torch.device | None = None) -> Reduce:
    def reduce(found: torch.Tensor) -> None:
        there = (
            found if device is None else found.to(device)
        )  # where the group's network is; parameters may be offloaded
        torch.distributed.all_reduce(there, group=group)
        found.copy_(there)

    return reduce


def _of_flat(params: Sequence[Any]) -> Iterator[Reduce]:
    """FSDP1: the processes that share a flat parameter."""
    if not any(map(torch_privates.is_flattened, params)):
        return
    held = set(params)
    handles = wrappers.instances(*torch_privates.FSDP1)
    own = [h for h in handles if not held.isdisjoint(torch_privates.of_flat_parameter(h))]
    yield from (_over(group, device) for group, device in {h.process_group: h.device for h in own}.items())


def _of_wrapper(optimizer: Optimizer) -> Iterator[Reduce]:
    """ZeRO-1, torch's and torch_xla's: the optimizer has parameters, or shards, that other processes have not."""
    name = "ZeroRedundancyOptimizer"
    of_torch = "torch.distributed.optim.zero_redundancy_optimizer"
    for zero in wrappers.instances(of_torch, name) if wrappers.is_distributed() else ():
        if vars(zero).get("optim") is optimizer:
            yield _over(zero.process_group, torch_privates.device_of_zero(zero))
    for zero in wrappers.instances("torch_xla.distributed.zero_redundancy_optimizer", name):
        if vars(zero).get("base_optimizer") is optimizer:
            yield from _over_xla(zero)


def _over_xla(zero: Any) -> Iterator[Reduce]:
    import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device

    def over(groups: Any) -> Reduce:
        def reduce(found: torch.Tensor) -> None:
            xm.all_reduce(xm.REDUCE_SUM, [found], groups=groups, pin_layout=zero.pin_layout)

        return reduce

    yield from map(over, torch_privates.groups_of_xla_zero(zero))
