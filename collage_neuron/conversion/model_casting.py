"""Casts models to bf16: what is checked before, and what becomes of their optimizers.

`compile(model)` without an optimizer casts the model now, and compiles its optimizer when that first steps, or saves.
torch runs global hooks before every step of every optimizer. Our hook looks for an ordinary optimizer over the
parameters of a model that was given to `compile`, compiles it, and makes this first step a compensated one already. Of
a model that was compiled with its optimizer it warns instead: only that one is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Set as AbstractSet
from functools import cache, wraps
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collage_neuron import torch_privates
from collage_neuron.conversion.buffers import is_rounded, kept, surround
from collage_neuron.conversion.loaded_weights import watch
from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.numerics.strategies import param_format
from collage_neuron.optimizer.pending_models import (
    COMPILED,
    CompileOptimizer,
    Original,
    Pending,
    as_it_was,
    high_word,
    is_cast_back,
    models,
    models_of,
    originals_in,
    rounded,
)
from collage_neuron.runtime import step_call, wrappers
from collage_neuron.runtime.preconditions import check_fully_shard, check_mode, check_param, is_left_alone
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping, is_compiled, params_of
from collage_neuron.states.sharding import local, rewrite_data
from collage_neuron.states.shared_memory import check_unshared

log = logging.getLogger("collage_neuron")

_seen: WeakSet[Optimizer] = WeakSet()
"""A cache of optimizers that do not belong to such a model, so that their later steps are not checked again."""


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


def compile_model(
    model: torch.nn.Module,
    settings: Settings,
    buffers: str,
    compile_optimizer: CompileOptimizer,
    named: frozenset[torch.Tensor] = frozenset(),
) -> torch.nn.Module:
    """Casts the model to bf16, but what the user has `named`, and keeps the fp32 values until an optimizer steps.

    One over its parameters is given to `compile_optimizer` then.
    """
    check_model(model)
    stay = kept(model, buffers, named)
    waiting = Pending(settings, {name: p for name, p in model.named_parameters() if p in stay}, compile_optimizer)
    fmt = param_format(settings.strategy, torch.bfloat16)
    with wrappers.followed(model):
        check_unshared((), model.parameters())
        _take_over(model, waiting)
        for name, p in model.named_parameters():
            if p.dtype == torch.float32 and p not in stay:
                value = p.detach().clone()
                waiting.memories.append(StorageWeakRef(p.untyped_storage()))
                rewrite_data(p, high_word(p.detach(), fmt))
                waiting.originals[name] = Original(value, p, torch_privates.version(p), fmt)
        _to_bf16(model, stay, named)
    models[model] = waiting
    _seen.clear()  # an optimizer that was none of ours may be this model's
    _look_at_steps()
    _look_at_loads()
    return model


def _take_over(model: torch.nn.Module, waiting: Pending) -> None:
    """What an earlier `compile` of the same model kept goes over to `waiting`; parameters cast to fp32 since get it."""
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p, original in originals_in(model).items():
        if p.dtype == torch.bfloat16:
            waiting.originals[names[p]] = original
        elif is_cast_back(p, original):
            rewrite_data(p, as_it_was(p, original))
    waiting.memories += models[model].memories if model in models else []


def cast_beside(
    model: torch.nn.Module, optimizer: Optimizer, stay: AbstractSet[torch.Tensor], named: AbstractSet[torch.Tensor]
) -> None:
    """Casts the rest of a model whose `optimizer` has just been compiled; warns of what is lost, and what may be later.

    Another optimizer over its parameters, which is not compiled, will be told that it trains in pure bf16.
    """
    _tell_rounded(model, optimizer, stay)
    _to_bf16(model, stay, named)
    _seen.clear()
    _look_at_steps()


def _tell_rounded(model: torch.nn.Module, optimizer: Optimizer, stay: AbstractSet[torch.Tensor]) -> None:
    """Warns in the log `collage_neuron` of trained fp32 parameters outside the optimizer that bf16 cannot hold."""
    held = set(params_of(optimizer)) | stay
    wide = {name: p for name, p in model.named_parameters() if p not in held and p.dtype == torch.float32}
    lost = {name: p for name, p in wide.items() if is_rounded(p)}
    found = [name for name, p in lost.items() if p.requires_grad]
    if found:
        log.warning(
            "%s%s of this %s become bf16, but the optimizer does not hold them: one that is compiled for them later "
            "begins with rounded weights. With several optimizers, write optimizer = compile(optimizer) for each, "
            "and compile(model, optimizer) only for the last one. If they are not trained: requires_grad_(False)",
            found[0],
            f" and {len(found) - 1} others" if len(found) > 1 else "",
            type(model).__name__,
        )
    # Frozen weights are cast as by `model.to`, without a word, and noted: they may be trained later.
    if frozen := {name: p for name, p in lost.items() if not p.requires_grad}:
        rounded.setdefault(model, {}).update(frozen)


def _to_bf16(
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


# --- optimizers that are not compiled yet -----------------------------------------------------------------------------


@cache
def _look_at_steps() -> None:
    # Once in a process (`cache`): this and the next are all that changes in it.
    register_optimizer_step_pre_hook(_before_any_step)


@cache
def _look_at_loads() -> None:
    # For what saves and loads torch has no hook for all optimizers; only models that are compiled alone need it.
    for name in ("state_dict", "load_state_dict"):
        setattr(Optimizer, name, _compiling(getattr(Optimizer, name)))


@torch_privates.not_compiled  # not for a compiler that compiles the step
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The global hook: compiles an optimizer over such a model before the optimizer's own hooks and step run."""
    if is_compiled(optimizer) or optimizer in _seen:
        return
    # The step in progress is still the method of the original class: `optimizer/bypass.py` takes it over.
    if not _compile_waiting(optimizer):
        _seen.add(optimizer)
        _tell_of_plain(optimizer)


def _tell_of_plain(optimizer: Optimizer) -> None:
    """Warns of an optimizer over bf16 parameters of a compiled model, unless it wraps a compiled one."""
    parts = [x for value in vars(optimizer).values() for x in (value if isinstance(value, (list, tuple)) else [value])]
    own = [p for p in params_of(optimizer) if p.dtype == torch.bfloat16]
    if any(hasattr(p, COMPILED) for p in own) and not any(map(is_compiled, parts)):
        warn_user(
            f"this {type(optimizer).__name__} is not compiled and trains bf16 parameters of a model that "
            "collage_neuron.compile(model, optimizer) has rounded: in pure bf16, where small steps are lost, and "
            "without the low words that the compiled optimizer may have of them. Compile it too, once it is made: "
            "optimizer = collage_neuron.compile(optimizer). If this is intended, filter this warning "
            "(collage_neuron.RoundedWeights)",
            RoundedWeights,
        )


def _compile_waiting(optimizer: Optimizer) -> bool:
    """Compiles an optimizer over such a model; returns True if it is one."""
    waiting = next((models[model] for model in models_of(optimizer)), None)
    if waiting is not None:
        with wrappers.followed(optimizer=optimizer), step_call.scaler_attributes(optimizer):
            waiting.compile_optimizer(optimizer, waiting.settings)
    return waiting is not None


def _compiling(method: Any) -> Any:
    """A method of torch's, but of an optimizer over such a model, which it compiles first."""
    # What is saved before the first step has the low words then. torch casts what it loads to bf16, integers and fp32
    # words too, so that compiling at the first step would be too late: trainers load before it.

    @wraps(method)
    def of_compiled(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # `o.load_state_dict(o.state_dict())` looks the first method up before the second one compiles.
        is_ours = is_compiled(self) and not bookkeeping(self).in_own_method
        if is_ours or (not is_compiled(self) and _compile_waiting(self)):
            return getattr(self, method.__name__)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return of_compiled
