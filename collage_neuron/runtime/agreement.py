"""`nonfinite="skip"` with several processes: all processes that share parameters skip a step, or none does.

Each process sees only the gradients of its own shards. So the decisions are summed on the device, over every process
group among which a parameter is sharded; processes without shards, or without gradients, take part. Nothing is needed
where all processes have equal gradients (DDP), or where there is one program (SPMD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.runtime import wrappers
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_distributed, is_sharded

Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over a process group, in place."""


def agreed(optimizer: Optimizer, params: Sequence[Any], finite: torch.Tensor) -> torch.Tensor:
    """The common decision, a 0-d mask like `finite`: true if it is true in all processes that share `params`.

    Raises:
        ValueError: the parameters were split by a library that does not tell its process groups.
    """
    reductions = _reductions(optimizer, params)
    if not reductions:
        return finite
    found = (~finite).float()  # a sum, as for gradients: not every collective library has a minimum over booleans
    for reduce in reductions:
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
    """The reductions for FSDP1: over the processes that share a flat parameter."""
    if not any(map(torch_privates.is_flattened, params)):
        return
    held = set(params)
    handles = wrappers.instances(*torch_privates.FSDP1)
    own = [h for h in handles if not held.isdisjoint(torch_privates.of_flat_parameter(h))]
    yield from (_over(group, device) for group, device in {h.process_group: h.device for h in own}.items())


def _of_wrapper(optimizer: Optimizer) -> Iterator[Reduce]:
    """The reductions for ZeRO-1 of torch and torch_xla, where each process has other parameters or shards."""
    name = "ZeroRedundancyOptimizer"
    of_torch = "torch.distributed.optim.zero_redundancy_optimizer"
    for zero in wrappers.instances(of_torch, name) if is_distributed() else ():
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
