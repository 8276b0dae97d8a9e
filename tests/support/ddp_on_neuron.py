"""What each process does in the tests of DDP on the device `neuron`; apart, since processes import it."""

from __future__ import annotations

import neuron_world
import torch
import torch.distributed as dist
import torch_neuronx_standin
from on_neuron import words
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.passes.backends.nki import schedule


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
        device, rank, group = torch.device("neuron", 0), dist.get_rank(), neuron_world.join()
        model = model_of(rank).to(device)  # DDP takes those of the first process
        optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if compile_first:
            model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)
        wrapped = DistributedDataParallel(model, process_group=group)
        if not compile_first:
            optimizer = collage_neuron.compile(optimizer, strategy=strategy)
        train(wrapped, optimizer, device, rank, range(steps))
        found = words(optimizer)
        assert all(neuron_world.is_same(x) for x in found)
        return found


def skipped() -> bool:
    """Returns True if this process skips a step in which the loss of one is not finite."""
    schedule.STARTS, schedule.STEPS = 1, 300
    with torch_neuronx_standin.install("trn2"):
        device, rank, group = torch.device("neuron", 0), dist.get_rank(), neuron_world.join()
        model = DistributedDataParallel(model_of(0).to(device), process_group=group)
        optimizer = collage_neuron.compile(torch.optim.AdamW(model.parameters(), lr=1e-2), nonfinite="skip")
        train(model, optimizer, device, rank, range(2))
        before = words(optimizer)
        (model(batch(2, rank).to(device)).float().sum() * (torch.nan if rank else 1.0)).backward()
        optimizer.step()
        return all(torch.equal(x, y) for x, y in zip(words(optimizer), before, strict=True))
