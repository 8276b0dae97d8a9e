"""What the processes of `worlds` run: optimizers with norms and means over whole parameters, of which each has shards.

The last shapes leave the second process without elements, and the others are uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharded_runs import Run, different, full, load, model_of, refusal, save, shard, train, whole
from staged import Lamb, Novograd, StableAdamW
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from worlds import traffic

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states import shard_sums

SHAPES = ((7, 6), (9,), (2, 3), (1, 5), (1,))


class Reading(Lamb):
    """Scales steps by a norm that Python reads."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * max(p.norm().item(), 1e-3))


class OfShards(Lamb):
    """Scales each shard by its own norm."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g.to_local() if isinstance(g, DTensor) else g
        p.sub_(g / (g.norm() + 1e-6), alpha=group["lr"])


class ByRows(Lamb):
    """Scales each row by its mean."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / (g.square().mean(-1, keepdim=True).sqrt() + 1e-6), alpha=group["lr"])


class Sized(Lamb):
    """Divides gradients by the number of elements of the whole: for one shape, twice that of its shard."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / p.numel())


class InShards:
    """An optimizer over shards, and the same over whole parameters, in this process."""

    def __init__(
        self, cls: Callable[..., Optimizer], mesh: DeviceMesh, how: Sequence[Any] = (Shard(0),), **settings: Any
    ) -> None:
        self.mesh, self.how = mesh, tuple(how)
        starts = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]
        starts = [x for x in starts if x.dim() == 2 or Shard(1) not in self.how]
        self.shards = [nn.Parameter(distribute_tensor(x.clone(), mesh, self.how)) for x in starts]
        self.wholes = [nn.Parameter(x.clone()) for x in starts]
        settings = {"strategy": "full"} | settings
        self.optimizer, self.twin = (collage_neuron.compile(cls(x), **settings) for x in (self.shards, self.wholes))

    def give(self, step: int, is_partial: bool = False) -> None:
        """Gradients that depend on the step; or each process has a part of their sum."""
        for i, (p, q) in enumerate(zip(self.shards, self.wholes, strict=True)):
            g = torch.randn(q.shape, generator=torch.Generator().manual_seed(100 * step + i))
            g = (1 + step) ** 2 * g.bfloat16()
            q.grad = g.clone()
            p.grad = distribute_tensor(g, self.mesh, self.how)
            if is_partial:
                p.grad = DTensor.from_local(g if dist.get_rank() == 0 else 0 * g, self.mesh, [Partial()])

    def step(self, steps: range, is_partial: bool = False) -> list[str]:
        """Steps both; the names of what differs."""
        for step in steps:
            self.give(step, is_partial)
            self.twin.step()
            self.optimizer.step()
        return self.wrong()

    def wrong(self) -> list[str]:
        return different(whole(self.optimizer), whole(self.twin))


def in_two() -> dict[str, Any]:
    """What is wrong of each claim, for two processes; nothing has to be."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "columns": InShards(StableAdamW, mesh, [Shard(1)], validate="off").step(range(2)),
        "replicated": InShards(Lamb, mesh, [Replicate()], validate="off").step(range(2)),
        "gradients in parts": InShards(Novograd, mesh, validate="off").step(range(2), is_partial=True),
        "random bits": InShards(Lamb, mesh, strategy="stochastic", validate="off").step(range(2)),
        "exact": beside_float64(mesh),
        "skipped": skipped(mesh),
        "sizes of the whole": InShards(Sized, mesh).step(range(8)),
    }


class Steps(NamedTuple):
    """What some steps of one optimizer have shown."""

    wrong: list[str]
    """What differs from whole parameters after two and three steps."""
    sent: dict[Any, int]
    """Bytes of the third, by collective and dtype."""
    sizes: list[int]
    """Totals in each collective of the third."""
    left_out: list[str]
    """What differs after a fourth, in which the totals of the second process are left out."""


def steps_of(cls: Callable[..., Optimizer], backend: str) -> Steps:
    run = InShards(cls, init_device_mesh("cpu", (2,)), backend=backend)
    wrong, sizes, gathered = run.step(range(2)), list[int](), shard_sums.Between.gathered

    def noted(self: shard_sums.Between, x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return gathered(self, x)

    def without_one(self: shard_sums.Between, x: Tensor) -> Tensor:
        rows = gathered(self, x)
        is_comparison = x.numel() == 2 and x[0] == x[1]
        return rows if is_comparison else torch.stack([rows[0], torch.zeros_like(rows[1])])

    run.give(2)
    run.twin.step()
    with patch.object(shard_sums.Between, "gathered", noted), traffic() as sent:
        run.optimizer.step()
    wrong += run.wrong()
    with patch.object(shard_sums.Between, "gathered", without_one):
        return Steps(wrong, sent, sizes, run.step(range(3, 4)))


def beside_float64(mesh: DeviceMesh) -> list[int]:
    """Parameters that are not those of the optimizer's own step on DTensors in fp64, within the roundings of one step.

    LAMB's step is fewer than 32 operations on fp32, each within 2^-24 of its result; norms are within 2^-23. The first
    step has no differences of nearly equal numbers but the last one, whose result is rounded to fp32 once more.
    """
    run = InShards(Lamb, mesh, strategy="fp32")
    exact = [nn.Parameter(distribute_tensor(q.detach().double(), mesh, run.how)) for q in start_of(run)]
    run.give(0)
    for p, q in zip(run.shards, exact, strict=True):
        assert isinstance(p.grad, DTensor)
        q.grad = distribute_tensor(p.grad.full_tensor().double(), mesh, run.how)
    before = [full(q).detach().clone() for q in exact]
    Lamb(exact).step()
    run.optimizer.step()
    found = [full(collage_neuron.exact_value(run.optimizer, p)).double() for p in run.shards]
    bounds = [2**-24 * (full(q).abs() + 64 * (full(q) - b).abs()) for q, b in zip(exact, before, strict=True)]
    return [
        i
        for i, (x, q, bound) in enumerate(zip(found, exact, bounds, strict=True))
        if ((x - full(q)).abs() > bound).any()
    ]


def start_of(run: InShards) -> list[Tensor]:
    return [collage_neuron.exact_value(run.twin, q) for q in run.wholes]


def skipped(mesh: DeviceMesh) -> list[str]:
    """What differs after a step that all skip, since one process has a NaN in its shard, and another step."""
    run = InShards(Novograd, mesh, nonfinite="skip", backend="reference", validate="off")
    run.step(range(2))
    before = whole(run.optimizer)
    run.give(2)
    for p in [*run.shards[:1], *run.wholes[:1]]:
        grad: Any = p.grad
        own = grad.to_local() if isinstance(grad, DTensor) else grad
        if (isinstance(grad, DTensor) and dist.get_rank() == 0) or not isinstance(grad, DTensor):
            own[0, 0] = torch.nan
    run.optimizer.step()
    run.twin.step()
    return [*different(whole(run.optimizer), before), *run.step(range(3, 4))]


def missing() -> list[str]:
    """What a step says if one process lacks all gradients in the first, or later one, or all; and what it changed."""
    run = InShards(Lamb, init_device_mesh("cpu", (2,)), validate="off")
    run.give(0)
    for p in run.shards if dist.get_rank() == 1 else ():
        p.grad = None
    said = [refusal(run.optimizer.step)]
    run.step(range(2))
    before = whole(run.optimizer)
    for lacking in (run.shards[1:2], run.shards):
        run.give(2)
        for p in lacking if dist.get_rank() == 1 else ():
            p.grad = None
        said.append(refusal(run.optimizer.step))
    run.give(3)
    run.shards[1].grad = run.wholes[1].grad = None  # in both
    changed = different(whole(run.optimizer), before)
    run.optimizer.step()
    run.twin.step()
    return [*said, *changed, *run.wrong()]


def rejected() -> list[str]:
    """What is said to sums that cannot be right, and what is changed by that."""
    said, mesh = [], init_device_mesh("cpu", (2,))
    for cls in (Reading, ByRows, OfShards):
        run = InShards(cls, mesh, validate="off")
        before = whole(run.optimizer)
        run.give(0)
        said += [refusal(run.optimizer.step, UnsupportedUpdate), *different(whole(run.optimizer), before)]
    run = InShards(Novograd, mesh)
    run.give(0)
    run.optimizer.step()
    for p in run.shards:  # as torch's own step would have left it
        run.optimizer.state[p]["v"] = DTensor.from_local(run.optimizer.state[p]["v"] / 2, mesh, [Partial()])
    return [*said, refusal(run.optimizer.step, UnsupportedUpdate)]


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def _trained(make: Callable[[nn.Module], Run], steps: range) -> Run:
    run = make(model_of(0))
    train(run, steps)
    return run


def plain(cls: Callable[..., Optimizer]) -> Callable[[nn.Module], Run]:
    return lambda model: collage_neuron.compile(model, cls(model.parameters()), strategy="full")


def fsdp(cls: Callable[..., Optimizer], **options: Any) -> Callable[[nn.Module], Run]:
    def make(model: nn.Module) -> Run:
        shard(model, **options)
        return plain(cls)(model)

    return make


def fsdp_last(cls: Callable[..., Optimizer]) -> Callable[[nn.Module], Run]:
    """Compiled before it is sharded."""

    def make(model: nn.Module) -> Run:
        collage_neuron.compile(model, strategy="full")
        shard(model)
        return model, cls(model.parameters())

    return make


def trained(folder: Path) -> dict[str, list[str]]:
    """What differs from an unsharded run, after training; and after a checkpoint was loaded by another run."""
    wrong = {}
    for cls, make in ((Lamb, fsdp_last), (StableAdamW, fsdp), (Novograd, fsdp)):
        alone = whole(_trained(plain(cls), range(3))[1])
        run = _trained(make(cls), range(2))
        if cls is Novograd:
            run[1].zero_grad()
            save(run, folder)
            other = fsdp(cls)(model_of(1))
            load(other, folder)
            train(other, range(2, 3))
            wrong["saved and loaded"] = different(whole(other[1]), alone)
        train(run, range(2, 3))
        wrong[cls.__name__] = different(whole(run[1]), alone)
    return wrong


def in_four() -> dict[str, list[str]]:
    """What differs from an unsharded run, for replicas of shards and for shards in two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    wrong = {}
    alone = whole(_trained(plain(Novograd), range(2))[1])
    wrong["HSDP"] = different(whole(_trained(fsdp(Novograd, mesh=mesh), range(2))[1]), alone)
    for how in ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0))):
        wrong[f"StableAdamW, {how}"] = InShards(StableAdamW, mesh, how, validate="off").step(range(2))
    wrong["a process without a gradient"] = [*(lacking(mesh, how) for how in LACKING), lacking_in_part(mesh)]
    return wrong


LACKING = ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Shard(0), Replicate()))


def lacking(mesh: DeviceMesh, how: Sequence[Any]) -> str:
    """What a process says, one of which lacks a gradient; nothing if it has changed something."""
    run = InShards(Lamb, mesh, how, validate="off")
    run.give(0)
    before = whole(run.optimizer)
    if dist.get_rank() == 3:
        run.shards[0].grad = None
    said = refusal(run.optimizer.step)
    return said if not different(whole(run.optimizer), before) else ""


def lacking_in_part(mesh: DeviceMesh) -> str:
    """The same, of a second group, whose mesh has two of the four processes: the others have to learn of it."""
    run, part = (InShards(Lamb, m, [Shard(0)] * m.ndim, validate="off") for m in (mesh, mesh["shard"]))
    run.optimizer.add_param_group({"params": part.shards})
    run.give(0)
    part.give(0)
    if dist.get_rank() == 3:
        part.shards[0].grad = None
    return refusal(run.optimizer.step)
