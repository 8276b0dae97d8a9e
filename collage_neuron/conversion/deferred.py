"""`compile(model)` without an optimizer: casts the model now, and compiles its optimizer at its first step.

torch runs global hooks before every step of every optimizer. Our hook looks for an ordinary optimizer over the
parameters of a model that was given to `compile`, compiles it, and makes this first step a compensated one already.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collage_neuron import torch_privates
from collage_neuron.conversion.buffers import kept
from collage_neuron.conversion.convert import check_model, compile_optimizer, to_bf16
from collage_neuron.conversion.waiting import Pending, models, models_of, settings_for
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import formats_for
from collage_neuron.optimizer.compiled import Compiled
from collage_neuron.runtime import amp, wrappers
from collage_neuron.settings import Settings
from collage_neuron.states import kept_formats, low_words
from collage_neuron.states.sharding import is_sharded, local, rewrite_data, spread
from collage_neuron.states.shared_memory import check_unshared
from collage_neuron.states.store import split_params, store

_seen: WeakSet[Optimizer] = WeakSet()
"""A cache of optimizers that do not belong to such a model, so that their later steps are not checked again."""
_installed: list[Any] = []


def compile_model(model: torch.nn.Module, settings: Settings, buffers: str) -> torch.nn.Module:
    """Casts the model to bf16 and keeps the fp32 values until an optimizer over its parameters steps."""
    check_model(model)
    waiting = Pending(settings, buffers)
    stay = kept(model, buffers)
    fmt = formats_for(settings.strategy, (), frozenset(), torch.bfloat16)["param"]
    with wrappers.followed(model):
        check_unshared((), model.parameters())
        for name, p in model.named_parameters():
            if p.dtype == torch.float32 and p not in stay:
                original = p.detach().clone()
                rewrite_data(p, high_word(p.detach(), fmt))
                waiting.originals[name] = original, p, torch_privates.version(p)
        to_bf16(model, stay)
    models[model] = waiting
    _seen.clear()  # an optimizer that was none of ours may be this model's
    if not _installed:  # the only hook of the process, and only for models that are compiled alone
        _installed.append(register_optimizer_step_pre_hook(_before_any_step))
    return model


def high_word(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The first word of `value` in the format `fmt` (of its local shard): the new value of the parameter itself."""
    word: torch.Tensor = fmt.encode(fmt.decode(fmt.encode(local(value).cpu())))[0]
    return word.to(value.device)


def compile_with_low_words(
    optimizer: Optimizer, settings: Settings, stays: Mapping[torch.Tensor, bool] = MappingProxyType({})
) -> None:
    """Compiles `optimizer`, and gives it the low words of the fp32 values that `compile_model` kept.

    Parameters that `compile_model` left in fp32 stay fp32, unless `stays` says otherwise.
    """
    settled = split_params(optimizer.state) | _written_in_all_processes()  # the former: by a checkpoint
    left = {t: True for model in models_of(optimizer) for t in kept(model, models[model].buffers)}
    compile_optimizer(optimizer, settings, left | dict(stays))
    _restore_low_words(optimizer, settled)


def _written_in_all_processes() -> set[torch.Tensor]:
    """Parameters that were written in place while several processes train, as DDP's initial broadcast does.

    After the broadcast all processes must agree, but receivers do not have the low words of the sender: all drop them.
    """
    if not wrappers.is_distributed():
        return set()
    kept = (o for waiting in models.values() for o in waiting.originals.values())
    return {p for _, p, version in kept if not is_sharded(p) and torch_privates.version(p) != version}


def _restore_low_words(optimizer: Optimizer, settled: set[torch.Tensor]) -> None:
    """Restores low words of elements that have not changed since the cast; changed elements keep their new value.

    Parameters in `settled` are left alone: their low words are in the optimizer's state, or dropped.
    """
    owned = {id(p): (p, group) for group in optimizer.param_groups for p in group["params"]}
    for model, waiting in models.items():
        for name, p in model.named_parameters():
            if id(p) not in owned or name not in waiting.originals or p.dtype != torch.bfloat16:
                continue
            value, _, _ = waiting.originals.pop(name)
            if p in settled or value.shape != p.shape:
                continue
            original = local(spread(value.to(p.device), p))
            settings = Settings.of(owned[id(p)][1])
            fmt = formats_for(settings.strategy, (), frozenset(), p.dtype)["param"]
            now = local(p.detach())
            kept = torch.where(high_word(original, fmt) == now, original, now.float())
            with torch.no_grad():
                store(p, optimizer.state[p], "param", fmt, kept, kept_formats.of(optimizer, p))
            low_words.remember(optimizer, p, low_words.FRESH)


@torch_privates.not_compiled  # not for a compiler that compiles the step
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The global hook: compiles an optimizer over such a model before the optimizer's own hooks and step run.

    The step in progress is still the method of the original class: `optimizer/bypass.py` takes it over.
    """
    if isinstance(optimizer, Compiled) or optimizer in _seen:
        return
    settings = settings_for(optimizer)
    if settings is None:
        _seen.add(optimizer)
        return
    with wrappers.followed(optimizer=optimizer), amp.put_aside(optimizer):
        compile_with_low_words(optimizer, settings)
