"""`compile(model)` alone: the model is made bf16 now, its optimizer is compiled when it first steps.

torch runs global hooks before every step of every optimizer. Ours looks for an ordinary optimizer over the
parameters of a marked model, compiles it, and sees to it that already this first step is the compensated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from collage_neuron.conversion.buffers import kept
from collage_neuron.conversion.convert import check_model, compile_optimizer, to_bf16
from collage_neuron.conversion.waiting import Pending, models, models_of, settings_for
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import formats_for
from collage_neuron.optimizer.compiled import Compiled, base_of, is_bypassed
from collage_neuron.runtime import amp, wrappers
from collage_neuron.settings import Settings
from collage_neuron.states import low_words
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_sharded, local, rewrite_data, spread
from collage_neuron.states.shared_memory import check_unshared
from collage_neuron.states.store import split_params, store

_seen: WeakSet[Optimizer] = WeakSet()
"""Optimizers that were looked at and are not ours: a cache, so that their later steps need not be looked at."""
_installed: list[Any] = []


def _install() -> None:
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_any_step))


def compile_model(model: torch.nn.Module, settings: Settings, buffers: str) -> torch.nn.Module:
    """Makes the model bf16 and remembers what the cast dropped until an optimizer over its parameters steps."""
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
                waiting.originals[name] = original, p, p._version
        to_bf16(model, stay)
    models[model] = waiting
    _seen.clear()  # an optimizer that was none of ours may be this model's
    _install()
    return model


def high_word(value: torch.Tensor, fmt: Format) -> torch.Tensor:
    """What the parameter itself will hold (a shard of it) once `value` is stored in `fmt`."""
    word: torch.Tensor = fmt.encode(fmt.decode(fmt.encode(local(value).cpu())))[0]
    return word.to(value.device)


def compile_with_low_words(
    optimizer: Optimizer, settings: Settings, stays: Mapping[torch.Tensor, bool] = MappingProxyType({})
) -> None:
    """Compiles `optimizer`, and gives it the low words that `compile_model` kept of its parameters.

    Of parameters that `stays` does not name, those stay fp32 that `compile_model` left so.
    """
    _install()
    settled = split_params(optimizer.state) | _written_in_all_processes()  # the former: by a checkpoint
    left = {t: True for model in models_of(optimizer) for t in kept(model, models[model].buffers)}
    compile_optimizer(optimizer, settings, left | dict(stays))
    _restore_low_words(optimizer, settled)


def _written_in_all_processes() -> set[torch.Tensor]:
    """Parameters that were written in place where several processes train, as DistributedDataParallel does first.

    After that all must hold the same, while those that it changed would have other low words than the one that sent.
    """
    if not wrappers.is_distributed():
        return set()
    kept = (o for waiting in models.values() for o in waiting.originals.values())
    return {p for _, p, version in kept if not is_sharded(p) and p._version != version}


def _restore_low_words(optimizer: Optimizer, settled: set[torch.Tensor]) -> None:
    """Low words for values that still are what they were; an element that was changed in between is taken as it is.

    Those in `settled` are taken as they are, with what the optimizer's state has.
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
                store(p, optimizer.state[p], "param", fmt, kept)
            low_words.remember(optimizer, p, low_words.FRESH)


@_disable_dynamo  # not for a compiler that compiles the step
def _before_any_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """The global hook: compiles an optimizer over a marked model, before its own hooks and its step run.

    That first step is still the one of the class before it was compiled, and so is every later one of a script that
    keeps `optimizer.step`: as a variable, or in torch.compile.
    """
    if not isinstance(optimizer, Compiled):
        settings = settings_for(optimizer) if optimizer not in _seen else None
        if settings is None:
            _seen.add(optimizer)
            return
        with wrappers.followed(optimizer=optimizer), amp.put_aside(optimizer):
            compile_with_low_words(optimizer, settings)
    ours = bookkeeping(optimizer)
    if ours.taking_over is not None:
        ours.taking_over.remove()  # it did its work in an earlier step
        ours.taking_over = None
    if isinstance(optimizer, Compiled) and is_bypassed(optimizer):
        ours.taking_over = optimizer.register_step_pre_hook(_take_over)  # the last hook: the user's own come before


@_disable_dynamo
def _take_over(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Takes the compensated step here, and leaves an optimizer without parameters to the step that was under way."""
    handle = bookkeeping(optimizer).taking_over
    if handle is None or getattr(handle, "done", False):
        return None
    handle.done = True
    loss = Compiled.step(optimizer, *args[1:], **kwargs)  # type: ignore[arg-type]
    again = {"closure": lambda: loss} if any(x is not None for x in (*args[1:], *kwargs.values())) else {}
    return (_without_parameters(optimizer),), again


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    empty = object.__new__(base_of(type(optimizer)))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = [dict(group, params=[]) for group in optimizer.param_groups]
    return empty
