"""Wrappers that already hold parameters when these become bf16: DDP gets a new reducer, others are rejected.

A parameter that changes its dtype gets a new node at which autograd accumulates its gradient. A wrapper's hooks on the
old node never run again: DDP would no longer reduce gradients, and the replicas would silently drift apart.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.live_objects import objects_of, with_subclasses
from collage_neuron.states.sharding import is_distributed, is_sharded

if TYPE_CHECKING:
    from collage_neuron.states.step_inventory import Seen

Names = Mapping[torch.Tensor, str]
"""Names of parameters for messages."""

AFTER = "compile first, with model, optimizer = collage_neuron.compile(model, optimizer), and wrap the model after that"

OF_A_CLASS = {"ZeroRedundancyOptimizer", "NxDOptimizer"}
"""Classes that step another optimizer: ZeRO of torch and torch_xla, and neuronx_distributed's wrapper of either."""


@contextmanager
def followed(model: torch.nn.Module | None = None, optimizer: Optimizer | None = None) -> Iterator[None]:
    """A context in which fp32 parameters of a model or optimizer become bf16: rebuilds the reducer of DDP over them.

    Raises:
        ValueError: another wrapper holds them, or a DDP whose reducer cannot be rebuilt; nothing has been changed.
    """
    wide = {p: where for p, where in _named(model, optimizer).items() if p.dtype == torch.float32}
    check_fsdp(wide)
    replicated = ddp_over(wide)
    for problem in chain.from_iterable(map(torch_privates.ddp_problems, replicated)):
        raise ValueError(
            f"the float32 parameters are held by a DistributedDataParallel with {problem}, which cannot be set up "
            f"anew for bfloat16: {AFTER}"
        )
    _check_nodes(wide, replicated)
    yield  # a reducer that is built before would have hooks on the old nodes
    for ddp in replicated:
        torch_privates.set_up_anew(ddp)


def _named(model: torch.nn.Module | None, optimizer: Optimizer | None) -> dict[torch.Tensor, str]:
    named: dict[torch.Tensor, str] = {}
    if model is not None:
        named |= {p: f"model parameter {name!r}" for name, p in model.named_parameters()}
    for i, group in enumerate([] if optimizer is None else optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            named.setdefault(p, f"param_groups[{i}]['params'][{j}]")
    return named


def check_fsdp(params: Names) -> None:
    """Raises ValueError for an fp32 parameter of FSDP1 or of torch_xla's FSDP, which keep fp32 copies of their own."""
    for p, where in params.items():
        if torch_privates.is_flattened(p):
            raise ValueError(
                f"{where} is float32 and held by FullyShardedDataParallel, which would go on with the float32 "
                "copy that it keeps: convert the model before it is wrapped (model.to(torch.bfloat16)) and compile "
                "after that, or shard it by fully_shard, of which float32 parameters can be compiled"
            )
        if torch_privates.is_of_xla_fsdp(p):
            raise ValueError(
                f"{where} is held by torch_xla's XlaFullyShardedDataParallel, which has float32 parameters only: "
                "leave its optimizer uncompiled, or shard the model by SPMD (mark_sharding), or the optimizer by "
                "torch_xla's ZeroRedundancyOptimizer"
            )


def check_stepper(cls: type) -> None:
    """Raises UnsupportedUpdate for classes of libraries that are in the place of the optimizer, and for their objects.

    Others that step an optimizer are compiled with it (`states/inner_optimizers.py`).
    """
    names = {c.__name__ for c in cls.__mro__}
    if names & OF_A_CLASS:
        raise UnsupportedUpdate(_advice_on_zero(cls))
    if names & {"AcceleratedOptimizer", "_FabricOptimizer"}:
        raise UnsupportedUpdate(
            f"{cls.__name__} steps the optimizer that accelerate's prepare or Fabric's setup was given: compile before "
            "that, or compile the one inside: collage_neuron.compile(model, optimizer.optimizer)"
        )


def _advice_on_zero(cls: type) -> str:
    dtype = ", optimizer_dtype=torch.bfloat16" if any("torch_xla" in c.__module__ for c in cls.__mro__) else ""
    return (
        f"{cls.__name__} makes its optimizer itself, over what each process has: give it a compiled class, "
        f"optimizer_class=collage_neuron.compile(AdamW){dtype}, and a model that is bfloat16 already "
        "(model.to(torch.bfloat16)). If it was given one, nothing else needs the line"
    )


def instances(module: str, name: str) -> list[Any]:
    """All objects of a class and its subclasses, if the module that has it was imported."""
    # A parameter does not know which wrapper holds it, and torch keeps no list of them: the garbage collector does.
    cls: Any = getattr(sys.modules.get(module), name, None)
    if cls is None:
        return []
    return objects_of(with_subclasses(cls))


def zero_of_xla(optimizer: Optimizer) -> list[Any]:
    """The ZeRO-1 of torch_xla that holds the optimizer, if one does, and has given it a part of each parameter."""
    found = instances("torch_xla.distributed.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    return [zero for zero in found if vars(zero).get("base_optimizer") is optimizer]


def is_part(p: Any) -> bool:
    """Returns True for a part of a parameter whose library (FSDP1, tensor parallelism) does not say who has the others.

    A DTensor says so itself.
    """
    if not vars(p) or is_sharded(p):
        return False
    return torch_privates.is_flattened(p) or bool(getattr(p, "tensor_model_parallel", False))


def shape_of_part(optimizer: Optimizer, seen: Seen | None = None) -> list[int] | None:
    """The shape of a parameter that is such a part, or of torch_xla's ZeRO-1; None if all are whole, or DTensors."""
    params = params_of(optimizer)
    found = next(filter(is_part, params), None)
    if found is None and params:
        # It lists all objects of the process: once, if a step has `seen` the same.
        ask = partial(zero_of_xla, optimizer)
        of_zero = ask() if seen is None else seen.structure.once("zero of xla", lambda: bool(ask()))
        found = params[0] if of_zero else None
    return None if found is None else list(found.shape)


def why_not_summed(p: Any) -> str | None:
    """Why the parts of a DTensor cannot be added up, as a clause; None if they can."""
    if any(not (x.is_shard() or x.is_replicate()) for x in p.placements):
        return f"its placements are {tuple(p.placements)}, and only Shard and Replicate are known"
    if p.device.type != "cpu" or p.device_mesh.device_type != "cpu":
        where = f"on {p.device}, in a mesh of type {p.device_mesh.device_type!r}"
        return f"it is {where}, and sums of shards are tried on CPUs only"
    return None


SUMS = "its step adds up elements of a parameter (a norm, a mean), or sees it in another shape (view)"


def of_part(what: str, shape: Sequence[int], reason: str) -> str:
    """What is said of an update that does what parts of a parameter cannot have, one of which has this shape."""
    return (
        f"{what}, and of a parameter with shape {shape} this process has a part only (FSDP, DTensor, tensor "
        f"parallelism, torch_xla's ZeRO-1): {reason}. Keep the parameters whole (DDP), shard them by fully_shard "
        "(FSDP2) on the CPU if the sums are over whole parameters, or use an optimizer that updates each element by "
        "itself"
    )


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer inside the wrapper of accelerate, which is an Optimizer too."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner


def ddp_over(params: Names) -> list[Any]:
    """The DistributedDataParallel modules that reduce gradients of `params`."""
    if not params or not is_distributed():
        return []  # without a process group there is none
    found = instances("torch.nn.parallel.distributed", "DistributedDataParallel")
    return [ddp for ddp in found if any(p in params for p in ddp.module.parameters())]


def _check_nodes(params: Names, replicated: Sequence[Any]) -> None:
    """Raises ValueError if something unknown holds the nodes where gradients of `params` are accumulated."""
    # Only if several processes train: with one process, the holder usually is the graph of a live loss.
    known = set(chain.from_iterable(ddp.module.parameters() for ddp in replicated))
    for p, where in params.items():
        if is_distributed() and p not in known and not is_sharded(p) and _is_held(p):
            raise ValueError(
                f"something holds on to the place where autograd accumulates the gradient of {where}: a wrapper that "
                "reduces gradients in hooks, which would not run once the parameter is bfloat16, or the graph of an "
                f"earlier loss. {AFTER[0].upper()}{AFTER[1:]}; or delete that loss (del loss)"
            )


def _is_held(p: torch.Tensor) -> bool:
    """Returns True if somebody holds the node where the gradient of `p` is accumulated; else torch makes a new one."""
    if not p.requires_grad or not p.is_leaf:
        return False

    def notes() -> Any:
        return get_gradient_edge(p).node.metadata

    # Each request makes a new node unless somebody holds the last one: only then is the mark still there.
    mark = object()
    notes()["collage_neuron"] = mark
    return notes().pop("collage_neuron", None) is mark
