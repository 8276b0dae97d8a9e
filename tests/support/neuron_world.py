"""A process group called `neuron`, as TorchNeuron registers one: collectives of tensors of the device, over gloo.

gloo takes no tensor of the device, so each collective sends the host's memory of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import neuron_device
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

COLLECTIVES = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce_scatter", "allreduce_coalesced")


class Group(dist.ProcessGroup):
    """The collectives that DDP, and this project's own checks, call."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # a process group in Python
        self.inner: Any = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # torch's name
        return neuron_device.NAME

    def barrier(self, options: Any = None) -> Any:
        return self.inner.barrier()


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: Group, *args: Any) -> Any:
        there = tree_map(lambda x: neuron_device.on_host(x) if neuron_device.is_ours(x) else x, args)
        return getattr(self.inner, name)(*there)

    return call


for _name in COLLECTIVES:
    setattr(Group, _name, _passed_on(_name))


def _made(store: Any, rank: int, size: int, timeout: Any) -> Group:
    return Group(store, rank, size, timeout)


def join() -> Any:
    """The group `neuron` of all processes, which are joined by gloo already."""
    neuron_device.register()
    if neuron_device.NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(neuron_device.NAME, _made, devices=[neuron_device.NAME])
    return dist.new_group(backend=neuron_device.NAME)


def is_same(x: Tensor) -> bool:
    """Returns True if all processes have the same bits of a tensor of the device."""
    mine = x.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    first = mine.clone()
    dist.broadcast(first, 0)
    same = torch.tensor([torch.equal(mine, first)])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)
