"""DDP on the device `neuron`: processes that are joined by a process group of its own, which sends over gloo.

TorchNeuron registers such a group: here it is collectives of tensors of the device over gloo, which takes none of
these, so each sends the host's memory of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import neuron_device
import pytest
import torch
import torch.distributed as dist
import torch_neuronx_standin
from on_neuron import words
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from worlds import run_world

import collage_neuron
from collage_neuron.passes.backends.nki import schedule

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


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()


def train(model: nn.Module, optimizer: Optimizer, device: torch.device, rank: int, steps: range) -> None:
    for i in steps:
        optimizer.zero_grad()
        model(batch(i, rank).to(device)).float().square().mean().backward()
        optimizer.step()


def replicas(strategy: str, steps: int, compile_first: bool) -> list[Tensor]:
    """Parameters and states after training in DDP, on the host; all processes must have the same."""
    schedule.STARTS, schedule.STEPS = 1, 300
    with torch_neuronx_standin.install("trn2"):
        device, rank, group = torch.device("neuron", 0), dist.get_rank(), join()
        model = model_of(rank).to(device)  # DDP takes those of the first process
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compile_first:
            model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)
        wrapped = DistributedDataParallel(model, process_group=group)
        if not compile_first:
            optimizer = collage_neuron.compile(optimizer, strategy=strategy)
        train(wrapped, optimizer, device, rank, range(steps))
        found = words(optimizer)
        assert all(is_same(x) for x in found)
        return found


@pytest.mark.parametrize("compile_first", [True, False])
@pytest.mark.parametrize("strategy", ["split433", "plus"])
def test_replicas_stay_the_same_bits(strategy: str, compile_first: bool, tmp_path: Path) -> None:
    found = run_world(2, tmp_path, replicas, strategy, 4, compile_first)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert len(found[0]) > 4
