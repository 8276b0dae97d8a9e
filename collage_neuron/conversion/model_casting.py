"""Models: what is checked of one before it becomes bf16, and how it does."""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from itertools import chain

import torch
from torch.optim import Optimizer

from collage_neuron.conversion.buffers import surround
from collage_neuron.conversion.loaded_weights import is_rounded, watch
from collage_neuron.optimizer.pending_models import COMPILED, rounded
from collage_neuron.runtime.preconditions import check_fully_shard, check_mode, check_param, is_left_alone
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.sharding import local, rewrite_data

log = logging.getLogger("collage_neuron")


def check_model(model: torch.nn.Module) -> None:
    """Raises TypeError for a trained parameter that is neither bfloat16 nor float32."""
    check_mode()
    check_fully_shard(model)
    for name, p in model.named_parameters():
        if not is_left_alone(p):
            check_param(p, f"model parameter {name!r}")


def check_together(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError if the optimizer holds none of the model's parameters; some of them are enough."""
    held = set(map(id, params_of(optimizer)))
    if held.isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"this {type(optimizer).__name__} holds no parameter of this {type(model).__name__}: was it built for "
            "another model, or before the model was copied or wrapped? Build it from the parameters of this one"
        )


def tell_rounded(model: torch.nn.Module, optimizer: Optimizer, stay: AbstractSet[torch.Tensor]) -> None:
    """Warns in the log `collage_neuron` of trained fp32 parameters outside the optimizer that bf16 cannot hold.

    A second optimizer would begin with rounded weights and without their low words. Frozen weights are cast as by
    `model.to`, without a word.
    """
    held = set(params_of(optimizer))
    found = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p not in held and p not in stay and _is_lost(p)
    ]
    if found:
        log.warning(
            "%s%s of this %s become bf16, but the optimizer does not hold them: one that is compiled for them later "
            "begins with rounded weights. With several optimizers, write optimizer = compile(optimizer) for each, "
            "and compile(model, optimizer) only for the last one. If they are not trained: requires_grad_(False)",
            found[0],
            f" and {len(found) - 1} others" if len(found) > 1 else "",
            type(model).__name__,
        )


def note_frozen(model: torch.nn.Module, optimizer: Optimizer, stay: AbstractSet[torch.Tensor]) -> None:
    """Notes the frozen fp32 parameters outside the optimizer that bf16 cannot hold: they may be trained later."""
    held = set(params_of(optimizer)) | stay
    lost = {name for name, p in model.named_parameters() if not p.requires_grad and p not in held and _is_lost(p)}
    if lost:
        rounded.setdefault(model, set()).update(lost)


def _is_lost(p: torch.Tensor) -> bool:
    return p.dtype == torch.float32 and is_rounded(p)


def to_bf16(
    model: torch.nn.Module, stay: AbstractSet[torch.Tensor], named: AbstractSet[torch.Tensor] = frozenset()
) -> None:
    """Casts remaining fp32 tensors (parameters outside the optimizer, buffers) as `model.to` does, except `stay`.

    Adds the hooks that a bf16 model needs in the place of an fp32 one; those of `stay` that the user has `named` need
    some too.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.dtype == torch.float32 and tensor not in stay:
            rewrite_data(tensor, local(tensor.detach()).to(torch.bfloat16))
    for p in model.parameters():
        setattr(p, COMPILED, True)
    surround(model, named)
    watch(model)
