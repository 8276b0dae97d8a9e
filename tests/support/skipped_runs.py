"""What the processes of `worlds` run for `test_wrapping`: a NaN in what one process holds, by kind of sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sharded_runs import adamw, ddp, different, fsdp, hsdp, model_of, parameters_of, refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import skipped_steps

Run = tuple[nn.Module | None, Any]
"""A model, and its optimizer or the wrapper that steps it; without a model gradients are made by hand."""


def compiled(model: nn.Module) -> Run:
    return collage_neuron.compile(model, adamw(model), strategy="full", nonfinite="skip")


def fsdp1() -> Run:
    return compiled(FullyShardedDataParallel(model_of(0).bfloat16(), device_id=torch.device("cpu")))


def fsdp1_use_orig_params() -> Run:
    inside = model_of(0).bfloat16()
    return compiled(FullyShardedDataParallel(inside, device_id=torch.device("cpu"), use_orig_params=True))


def tensor_parallel() -> Run:
    """Two meshes: a parameter of one is spread over rows of processes, one of the other over columns."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    params = [nn.Parameter(distribute_tensor(torch.randn(4, 3), mesh[name], [Shard(0)])) for name in ("a", "b")]
    return None, collage_neuron.compile(AdamW(params, lr=1e-2), strategy="full", nonfinite="skip")


def zero() -> Run:
    return of_zero(model_of(0).bfloat16())


def zero_with_more_processes_than_parameters() -> Run:
    torch.manual_seed(0)
    return of_zero(nn.Linear(6, 1, bias=False).bfloat16())


def of_zero(model: nn.Module) -> Run:
    made = collage_neuron.compile(AdamW, strategy="full", nonfinite="skip")
    return DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), made, lr=1e-2)


KINDS: dict[str, Callable[[], Run]] = {
    **{f.__name__: partial(lambda f: f(model_of(0), "full", nonfinite="skip"), f) for f in (ddp, fsdp, hsdp)},
    **{
        f.__name__: f
        for f in (fsdp1, fsdp1_use_orig_params, tensor_parallel, zero, zero_with_more_processes_than_parameters)
    },
}


# --- steps ------------------------------------------------------------------------------------------------------------


def local(t: Any) -> torch.Tensor:
    part: torch.Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part


def inner(optimizer: Any) -> Optimizer:
    found: Optimizer = getattr(optimizer, "optim", optimizer)
    return found


def held(optimizer: Any) -> dict[str, torch.Tensor]:
    """Bits of what this process holds, but for the step count."""
    found = {}
    for i, p in enumerate(parameters_of(inner(optimizer))):
        for name, value in {"param": p, **inner(optimizer).state[p]}.items():
            if name != "step":
                found[f"{i} {name}"] = local(value).detach().clone().view(torch.int16)
    return found


def make_gradients(run: Run, step: int, worth: float = 1.0) -> None:
    model, optimizer = run
    optimizer.zero_grad()
    if model is None:
        for p in parameters_of(optimizer):
            p.grad = torch.full_like(p, 1.0 + step)
    else:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step)).bfloat16()
        model(worth * x).float().square().mean().backward()


def own_elements(optimizer: Any) -> Iterator[torch.Tensor]:
    """Gradients of which this process has an element."""
    return (g for p in parameters_of(optimizer) if p.grad is not None and (g := local(p.grad)).numel() > 0)


def spoil(optimizer: Any, rank: int, nothing_elsewhere: bool) -> None:
    """A NaN in the last gradient of which process `rank` has an element; or the others have no gradients at all."""
    if dist.get_rank() == rank:
        list(own_elements(inner(optimizer)))[-1].view(-1)[-1] = torch.nan
    elif nothing_elsewhere:
        optimizer.zero_grad()


def skipped(kind: str) -> list[str]:
    """What is wrong with steps that a NaN in one process's part, by process, should have had all skip."""
    run, wrong = KINDS[kind](), []
    size, count = dist.get_world_size(), 0
    make_gradients(run, 0)
    run[1].step()
    for rank in range(size if kind != "zero_with_more_processes_than_parameters" else 1):
        for nothing_elsewhere in (False, True) if run[0] is None or kind.startswith("fsdp") else (False,):
            make_gradients(run, 1, torch.nan if kind == "ddp" and dist.get_rank() == rank else 1.0)
            before = held(run[1])
            if kind != "ddp":  # which makes gradients equal before anything sees them
                spoil(run[1], rank, nothing_elsewhere)
            run[1].step()
            count += 1
            wrong += [f"NaN in process {rank}: {name}" for name in different(held(run[1]), before)]
            if (found := skipped_steps(inner(run[1]))) != count:
                wrong.append(f"NaN in process {rank}: {found} skipped steps and not {count}")
    before = held(run[1])
    make_gradients(run, 2)
    run[1].step()
    if before and different(held(run[1]), before) == []:
        wrong.append("a step without NaN changes nothing")
    return wrong


def of_an_unknown_library() -> str:
    """The message where neuronx_distributed's or Megatron's layers have split a parameter."""
    p: Any = nn.Parameter(torch.ones(2).bfloat16())
    p.tensor_model_parallel = True
    optimizer = collage_neuron.compile(AdamW([p]), nonfinite="skip")
    p.grad = torch.ones_like(p)
    said = refusal(optimizer.step)
    assert torch.equal(p, torch.ones_like(p))
    return said
