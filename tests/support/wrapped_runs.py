"""What the processes of `worlds` run for `test_wrapping`: wrappers that hold fp32 parameters before the line."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from as_written import Written
from foreign import Langevin, ScheduleFreeAdamW
from sharded_runs import Whole, adamw, different, model_of, parameters_of, refusal, whole
from staged import Lamb
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType as built_in
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

STEPS = 3

Run = tuple[nn.Module, Optimizer]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def backward(model: nn.Module, x: torch.Tensor) -> None:
    dtype = next(p.dtype for p in model.parameters())
    model(x.to(dtype)).float().square().mean().backward()


def by_hand(start: nn.Module | None = None, optimizer: Optimizer | None = None, microsteps: int = 1) -> Whole:
    """All bits of replicas that nothing wraps, whose bf16 gradients are averaged here."""
    model = start or model_of(0)
    model, optimizer = collage_neuron.compile(model, optimizer or adamw(model), strategy="full")
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(microsteps):
            backward(model, batch(10 * i + step, dist.get_rank()))
        for p in parameters_of(optimizer):
            if p.grad is not None:
                p.grad /= dist.get_world_size()
                dist.all_reduce(p.grad)
        optimizer.step()
    return whole(optimizer)


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS)) -> Whole:
    for step in steps:
        optimizer.zero_grad()
        backward(model, batch(step, dist.get_rank()))
        optimizer.step()
    return whole(optimizer)


# --- DDP around fp32 parameters, then the line: every form ------------------------------------------------------------


FORMS: dict[str, Callable[[nn.Module, nn.Module, Optimizer], tuple[Any, ...]]] = {
    "wrapped_and_optimizer": lambda raw, ddp, optimizer: (ddp, optimizer),
    "raw_and_optimizer": lambda raw, ddp, optimizer: (raw, optimizer),
    "optimizer_alone": lambda raw, ddp, optimizer: (optimizer,),
    "wrapped_alone": lambda raw, ddp, optimizer: (ddp,),
    "raw_alone": lambda raw, ddp, optimizer: (raw,),
}


def every_form() -> dict[str, Whole]:
    """All bits by form of the call, and of replicas that are not wrapped."""
    found = {"by hand": by_hand()}
    for name, targets in FORMS.items():
        raw = model_of(0)
        ddp = DistributedDataParallel(raw)
        optimizer = adamw(ddp)
        collage_neuron.compile(*targets(raw, ddp, optimizer), strategy="full")
        found[name] = train(ddp, optimizer)
    return found


# --- options of DDP ---------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """`used` trains in every step; `unused` never does."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = model_of(0), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.used(x)


def summing(state: list[int], bucket: Any) -> Any:
    """A communication hook that does what DDP does without one, and counts the dtypes that it sees."""
    state.append(bucket.buffer().dtype.itemsize)
    work: Any = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


summing.__annotations__.clear()  # torch compares them with classes, and here they are texts

MODELS = {"batch norm": lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))}
OPTIONS: dict[str, dict[str, Any]] = {
    "small buckets": {"bucket_cap_mb": 20 / 2**20},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "unused in a static graph": {"static_graph": True},
    "batch norm": {},  # which stays fp32 among bf16 parameters
    "frozen objects": {},
}


@contextmanager
def frozen() -> Iterator[None]:
    """A context in which the garbage collector lists no object from before, and says that some are frozen."""
    marker, count = nn.Linear(1, 1), gc.get_freeze_count
    gc.freeze()
    gc.get_freeze_count = lambda: 1  # worlds hide what they freeze
    yield
    gc.get_freeze_count = count
    assert not any(x is marker for x in gc.get_objects())  # it is frozen again


def every_option() -> dict[str, tuple[Whole, Whole]]:
    """All bits of a wrapped run, and of one by hand, by option."""
    found, usual = {}, by_hand()
    for name, options in OPTIONS.items():
        make = MODELS.get(name, Branches if name.startswith("unused") else None)
        torch.manual_seed(0)
        model: nn.Module = make() if make else model_of(0)
        ddp = DistributedDataParallel(model, **options)
        optimizer = adamw(ddp)
        with frozen() if name == "frozen objects" else nullcontext():
            collage_neuron.compile(ddp, optimizer, strategy="full")
        torch.manual_seed(0)
        found[name] = train(ddp, optimizer), by_hand(make()) if make else usual
    found["hook"] = with_a_hook(), usual
    found["no_sync"] = accumulated(), by_hand(microsteps=2)
    found["after a step"] = after_steps()
    return found


def with_a_hook() -> Whole:
    seen: list[int] = []
    ddp = DistributedDataParallel(model_of(0))
    ddp.register_comm_hook(seen, summing)
    _, optimizer = collage_neuron.compile(ddp, adamw(ddp), strategy="full")
    found = train(ddp, optimizer)
    assert set(seen) == {2}
    return found


def accumulated() -> Whole:
    """Two microsteps, the first of which sends nothing."""
    ddp = DistributedDataParallel(model_of(0))
    _, optimizer = collage_neuron.compile(ddp, adamw(ddp), strategy="full")
    for step in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            backward(ddp, batch(step, dist.get_rank()))
        backward(ddp, batch(10 + step, dist.get_rank()))
        optimizer.step()
    return whole(optimizer)


def after_steps() -> tuple[Whole, Whole]:
    """The line after two fp32 steps, in which DDP has settled its buckets; gradients are still there."""
    found = []
    for wrapped in (True, False):
        model = model_of(0)
        ddp = DistributedDataParallel(model)
        optimizer = adamw(model)
        train(ddp, optimizer, range(2))
        if wrapped:
            collage_neuron.compile(ddp, optimizer, strategy="full")
            found.append(train(ddp, optimizer))
        else:
            other = model_of(1)
            other.load_state_dict(model.state_dict())
            fresh = AdamW(other.parameters(), lr=1e-2, weight_decay=0.1)
            fresh.load_state_dict(optimizer.state_dict())
            found.append(by_hand(other, fresh))
    return found[0], found[1]


# --- what cannot be set up anew ---------------------------------------------------------------------------------------


def rejected() -> dict[str, str]:
    """Messages by what is wrong; nothing may have been changed."""
    found = {}
    for name, spoil in SPOILED.items():
        ddp: Any = DistributedDataParallel(model_of(0))
        optimizer = adamw(ddp)
        spoil(ddp)
        found[name] = refusal(partial(collage_neuron.compile, ddp, optimizer))
        assert type(optimizer) is AdamW
        assert {p.dtype for p in ddp.parameters()} == {torch.float32}
    return found


def after_a_backward(ddp: Any) -> None:
    ddp.register_comm_hook([], summing)
    backward(ddp, batch(0, 0))


SPOILED: dict[str, Callable[[Any], object]] = {
    "mixed precision": lambda ddp: setattr(ddp, "mixed_precision", object()),
    "built in": lambda ddp: ddp._register_builtin_comm_hook(built_in.ALLREDUCE),
    "in backward": lambda ddp: setattr(ddp.module[0].weight, "_in_backward_optimizers", []),
    "hook that ran": after_a_backward,
    "python": lambda ddp: setattr(ddp, "_use_python_reducer", True),
    "delayed": lambda ddp: ddp._delay_all_reduce_params.append(ddp.module[0].weight),
}


def held_by_something() -> list[str]:
    """A wrapper that torch does not have, which reduces gradients in hooks, as Horovod's and Apex's do; and a loss."""
    model = model_of(0)
    nodes = [get_gradient_edge(p).node for p in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: None)
    messages = [refusal(lambda: collage_neuron.compile(adamw(model)))]
    other = model_of(0)
    loss = other(batch(0, 0)).sum()
    messages.append(refusal(lambda: collage_neuron.compile(other)))
    del loss
    collage_neuron.compile(other)
    return messages


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def fsdp1(model: nn.Module, use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp1_of_fp32() -> list[str]:
    """Messages for the model, what is in it, and the optimizer alone, each with both kinds of parameters."""
    messages = []
    for use_orig_params in (True, False):
        raw = model_of(0)
        wrapped = fsdp1(raw, use_orig_params)
        optimizer = adamw(wrapped)
        targets: list[Any] = [(wrapped, optimizer), (raw, optimizer), (optimizer,), (wrapped,), (raw,)]
        messages += [refusal(partial(collage_neuron.compile, *target)) for target in targets]
        assert type(optimizer) is AdamW
        assert {p.dtype for p in wrapped.parameters()} == {torch.float32}
    return messages


def fsdp1_of_bf16(use_orig_params: bool, make: Callable[[nn.Module], Optimizer] = adamw) -> list[bool]:
    """Whether each parameter of a model that was bf16 when it was wrapped ends with the bits of one process."""
    wrapped = fsdp1(model_of(0).bfloat16(), use_orig_params)
    alone = model_of(0).bfloat16()
    for model in (wrapped, alone):
        _, optimizer = collage_neuron.compile(model, make(model), strategy="full")
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, batch(step, 0))
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        inside = wrapped.module.parameters()
        return [torch.equal(p, q) for p, q in zip(inside, alone.parameters(), strict=True)]


def schedule_free(model: nn.Module) -> Optimizer:
    return ScheduleFreeAdamW(model.parameters())


def fsdp1_of_others(use_orig_params: bool) -> tuple[list[bool], list[str]]:
    """The same of a class that is traced; and what is said to updates that are not elementwise, and changed by them."""
    said = [fsdp1_rejected(use_orig_params, cls) for cls in (Lamb, Reading, Langevin, Later)]
    return fsdp1_of_bf16(use_orig_params, schedule_free), said


class Reading(Written):
    """Scales steps by a norm that Python reads."""

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * max(p.norm().item(), 1e-3))


class Later(Written):
    """Adds up elements in its third step, which `compile` does not see."""

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(g / (1 + g.norm()) if state["step"] == 3 else g, alpha=group["lr"])


def fsdp1_rejected(use_orig_params: bool, cls: Callable[[Any], Optimizer]) -> str:
    """What `compile` or a step of an optimizer says; nothing may be changed."""
    wrapped = fsdp1(model_of(0).bfloat16(), use_orig_params)
    optimizer = cls(wrapped.parameters())
    if said := refusal(lambda: collage_neuron.compile(wrapped, optimizer), UnsupportedUpdate, ""):
        return said
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(wrapped, batch(step, 0))
        before = whole(optimizer)
        if said := refusal(optimizer.step, UnsupportedUpdate, ""):
            return said if not different(whole(optimizer), before) else "something was changed"
    return "no refusal"


def fsdp1_after_the_line() -> str:
    """What the first step says where FSDP1 has cut parameters that have low words; nothing may be changed."""
    model = model_of(0)
    optimizer = adamw(model)
    collage_neuron.compile(model, optimizer)
    wrapped = fsdp1(model, use_orig_params=True)
    backward(wrapped, batch(0, 0))
    before = [p.detach().clone() for p in wrapped.parameters()]
    message = refusal(optimizer.step)
    assert all(torch.equal(p, q) for p, q in zip(wrapped.parameters(), before, strict=True))
    return message


def fsdp1_after_the_model_alone(use_orig_params: bool) -> bool:
    """Whether a model that was compiled alone and then wrapped trains; low words go where shapes are others."""
    wrapped = fsdp1(collage_neuron.compile(model_of(0), strategy="full"), use_orig_params)
    optimizer = adamw(wrapped)
    before = [p.detach().clone() for p in wrapped.parameters()]
    backward(wrapped, batch(0, 0))
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(wrapped.parameters(), before, strict=True) if p.numel()]
    return all(moved) and {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}
