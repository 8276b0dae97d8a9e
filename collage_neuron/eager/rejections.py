"""What cannot run as written either: reasons, which are known before anything changes."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_not
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.codec import check_codec, converter
from collage_neuron.eager.presented_layout import outlines
from collage_neuron.errors import RoundedWeights, UnknownUpdate, UnsupportedUpdate, warn_user
from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.runtime import wrappers
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.runtime.wrappers import why_not_summed
from collage_neuron.settings import Settings
from collage_neuron.states import inner_optimizers, shared_memory, step_inventory
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.sharding import ORDINARY, TRIED, is_sharded, is_sharded_like, version
from collage_neuron.states.state_keys import is_value
from collage_neuron.trace.code_inspection import looks_at_graphs

# What torch says where a step differentiates gradients that have no graph.
_SECOND_BACKWARD = ("does not have grad_fn", "does not have a grad_fn", "does not require grad")

PLAIN = (torch.Tensor.__torch_function__, torch.Tensor.__torch_dispatch__)


def check(
    base: type[Optimizer],
    optimizer: Optimizer,
    refusal: UnsupportedUpdate,
    settings: Sequence[Settings],
    may_compile: bool = False,
    is_known: bool = True,
) -> None:
    """Raises `refusal`, with what else there is to say, if the step cannot run as written either.

    `settings` are those of the groups. A step that `may_compile` says itself what it cannot; so does one, of parts of
    parameters, of which it is not known yet that it has to run as written.
    """
    may_compile = may_compile or isinstance(refusal, UnknownUpdate)
    check_class(base, optimizer, refusal)
    of_params = _of_params(base, optimizer, may_compile or not is_known)
    for reason in (*_of_groups(optimizer, settings, may_compile), *of_params):
        raise _neither(refusal, reason) from refusal


def check_class(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> None:
    """Raises `refusal` for what depends on the class of the optimizer alone, and on its attributes."""
    if "dense gradients" in str(refusal.__cause__):  # SparseAdam's own words
        raise refusal
    if any(words in str(refusal.__cause__) for words in _SECOND_BACKWARD):
        raise _neither(refusal, "it differentiates again, and the gradients that it sees have no graph")
    inner_optimizers.check(optimizer)


def _neither(refusal: UnsupportedUpdate, reason: str) -> UnsupportedUpdate:
    return UnsupportedUpdate(f"{refusal}. Nor can step() run as written: {reason}")


def _of_groups(optimizer: Optimizer, chosen: Sequence[Settings], may_compile: bool) -> Iterator[str]:
    for i, (group, settings) in enumerate(zip(optimizer.param_groups, chosen, strict=True)):
        if settings.arithmetic != "fp32" and not may_compile:
            yield f"param_groups[{i}] has arithmetic={settings.arithmetic!r}, and a step as written computes in fp32"
        if group["params"]:
            formats = formats_for(settings.strategy, (), NO_ROLES, torch.bfloat16)
            device = group["params"][0].device
            try:
                check_codec(converter(settings.backend, device), list(formats.values()), device)
            except UnsupportedUpdate as missing:
                yield f"param_groups[{i}]: {missing}"


def _of_params(base: type[Optimizer], optimizer: Optimizer, may_compile: bool) -> Iterator[str]:
    parts = not may_compile and bool(wrappers.zero_of_xla(optimizer))
    for i, group in enumerate(optimizer.param_groups):
        if _are_usual(group["params"]) and not parts:  # most are: one question for all of them is cheap
            continue
        for j, p in enumerate(group["params"]):
            if _are_usual([p]) and not parts:
                continue
            where = f"param_groups[{i}]['params'][{j}]"
            if is_sharded(p):
                yield from (f"{where} is a shard, and {why}" for why in _of_shard(p))
            if _with_graphs([p]) and looks_at_graphs(base, optimizer):
                yield f"the gradient of {where} has a graph (create_graph=True), which its fp32 value has not"
            if p.device.type not in TRIED:
                yield f"{where} is on {p.device}, and steps as written are tried on {', '.join(TRIED)} only"
            if parts or (wrappers.is_part(p) and not may_compile):
                yield f"of {where} this process has a part only (FSDP1, tensor parallelism, torch_xla's ZeRO-1)"
            if not is_sharded(p) and (type(p).__torch_function__, type(p).__torch_dispatch__) not in _KNOWN:
                yield f"{where} is a {type(p).__name__}, whose operations are its own"


def _of_shard(p: Any) -> Iterator[str]:
    if reason := why_not_summed(p):
        yield reason
    if type(torch_privates.part(p)) not in ORDINARY:
        yield f"what is in it is a {type(torch_privates.part(p)).__name__}"
    if p.grad is not None and not is_sharded_like(p.grad, p):
        yield "its gradient is sharded otherwise"


def _are_usual(params: Sequence[torch.Tensor]) -> bool:
    """Returns True for parameters without attributes of their own: nothing is to be said about most."""
    if not ORDINARY.issuperset(map(type, params)) or any(map(vars, params)):
        return False
    return not _with_graphs(params) and all(p.is_cpu or p.device.type in TRIED for p in params)


def _with_graphs(params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters whose gradients were computed with `create_graph=True`, and these."""
    grads = list(map(_grad, params))
    if not any(map(_requires_grad, filter(_is_there, grads))):
        return []
    return [(p, g) for p, g in zip(params, grads, strict=True) if g is not None and g.requires_grad]


_grad, _requires_grad, _is_there = attrgetter("grad"), attrgetter("requires_grad"), partial(is_not, None)


@contextmanager
def graphs_left_out(base: type[Optimizer], optimizer: Optimizer) -> Iterator[None]:
    """A context in which gradients have no graphs, unless code of the class asks for these: fp32 values have none."""
    found = _with_graphs(params_of(optimizer))
    if not found or looks_at_graphs(base, optimizer):
        yield
        return
    without = [g.detach() for _, g in found]
    for (p, _), x in zip(found, without, strict=True):
        p.grad = x
    try:
        yield
    finally:
        for (p, g), x in zip(found, without, strict=True):
            if p.grad is x:
                p.grad = g


def check_apart(optimizer: Optimizer) -> None:
    """Raises ValueError for memory that two values, or one and a gradient, share: as fp32 each has its own."""
    seen = step_inventory.of(optimizer)
    if seen is not None and shared_memory.lies_apart(seen, shared_memory.PRESENTED, seen.gradients()):
        return
    params = [p for p in params_of(optimizer) if not is_left_alone(p)]
    grads = [g for g in map(_grad, params) if g is not None]

    def written() -> Iterator[tuple[str, torch.Tensor]]:
        # One object that is two states, or a state and a gradient, is one value; but two if each has scales of its own.
        known, coded = set(map(id, grads)), set[int]()
        for p, outline in zip(params, outlines(optimizer, params, seen), strict=True):
            state: Any = dict.get(optimizer.state, p)
            for name, fmt, keys in outline.values if p.grad is not None else ():
                owner = p if name == "param" else state[name]
                is_one = id(owner) in known and id(owner) not in coded
                yield from (("" if is_one else name, x) for x in (owner, *(state[key] for key in keys)))
                known.add(id(owner))
                coded |= {id(owner)} if fmt.is_coded else set()

    shared_memory.check_apart(seen, shared_memory.PRESENTED, written, grads)


def tell_of_joined(base: type[Optimizer], optimizer: Optimizer, presented: Container[int]) -> None:
    """Warns of parameters that a step has put into groups itself, and written: they had no fp32 values in it.

    `presented` has the ids of those that had.
    """
    joined = [p for p in params_of(optimizer) if id(p) not in presented and not is_left_alone(p)]
    if shapes := [list(p.shape) for p in joined if p.dtype == torch.bfloat16 and _may_be_written(optimizer, p)]:
        warn_user(
            f"{base.__name__}.step() puts {len(shapes)} parameters into a group, the first of shape {shapes[0]}, and "
            "updates them in bf16. Put them there between steps (optimizer.add_param_group)",
            RoundedWeights,
        )


def _may_be_written(optimizer: Optimizer, p: torch.Tensor) -> bool:
    low = bookkeeping(optimizer).marks.params.get(p)
    return p.grad is not None and (version(p) > 0 if low is None else not low.is_of(p))


def check_states(optimizer: Optimizer) -> None:
    """Raises UnsupportedUpdate for states that share memory when they become words: each would have its own."""
    params = params_of(optimizer)
    values = ((k, x) for p in params for k, x in optimizer.state.get(p, {}).items() if is_value(x, p))
    if why := shared_memory.names_of_shared([*(("param", p) for p in params), *values]):
        raise UnsupportedUpdate(
            f"{type(optimizer).__name__} cannot be compiled: {why} share memory, and each would have words of its own; "
            "clone() it"
        )


_KNOWN = PLAIN, (torch.nn.Parameter.__torch_function__, torch.nn.Parameter.__torch_dispatch__)
