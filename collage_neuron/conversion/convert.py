"""Compiles an optimizer object; all that can be rejected is rejected before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.conversion import aliased_memory
from collage_neuron.conversion.budget import within
from collage_neuron.eager import rejections
from collage_neuron.eager.commit import formats_as_written
from collage_neuron.eager.step import check_sound
from collage_neuron.errors import StrategyChanged, UnsupportedUpdate, naming, warn_user
from collage_neuron.numerics.formats import FORMATS, Format, is_component
from collage_neuron.numerics.strategies import formats_of_shape
from collage_neuron.optimizer import first_step_report, group_settings
from collage_neuron.optimizer.compiled import Compiled, become_compiled, change_settings, compiled_class
from collage_neuron.optimizer.group_settings import describe_change
from collage_neuron.optimizer.pending_models import (
    assigned_since,
    known_in,
    models,
    models_of,
    restore_low_words,
    warn_of_rounded,
    written_in_all_processes,
)
from collage_neuron.passes.backends.protocol import check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir.update import Recording
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime import fallback_warning, update_formats
from collage_neuron.runtime.preconditions import check_optimizer
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.runtime.step_plan import Records
from collage_neuron.runtime.wrappers import check_stepper, shape_of_part
from collage_neuron.settings import DRAWN, KEYS, UNSUPPORTED, Settings, filled
from collage_neuron.states import (
    external_writes,
    inner_optimizers,
    low_words,
    param_checks,
    strategy_checks,
    visible_states,
)
from collage_neuron.states.bookkeeping import bookkeeping, discarded_on_error, params_of
from collage_neuron.states.format_record import drop_placeholders
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.state_keys import is_host_scalar, split_params
from collage_neuron.states.store import ensure_stored, read_exact, record_of, settle, store
from collage_neuron.trace import dry_run, replayed_steps

FP32 = FORMATS["fp32"]

Plan = tuple[Recording | None, Mapping[str, Format]]
"""The update of a group, if it is captured, and the formats of its bf16 parameters and their states."""


def compile_optimizer(
    optimizer: Optimizer,
    settings: Settings,
    stays: Mapping[torch.Tensor, bool] = MappingProxyType({}),
    budget: int | None = None,
) -> None:
    """Replaces the class of `optimizer` and splits its fp32 parameters and states.

    With a `budget` of bytes per parameter, the strategy is the safest one that fits (`conversion/budget.py`).

    A group that names its own settings (`collage_strategy`, ...) keeps them, unless it was compiled before. fp32
    parameters that are true in `stays`, or stayed before and are not in it, remain fp32 and are updated in plain fp32.
    Those of a model that was given to `compile` alone get the low words of the fp32 values that were kept.
    """
    waiting = models_of(optimizer)
    settled = split_params(optimizer.state) | written_in_all_processes() if waiting else set()  # by a checkpoint, DDP
    settled |= assigned_since(params_of(optimizer))
    left = {p: True for model in waiting for _, p in known_in(model, models[model].stay, params_of(optimizer))}
    check_stepper(type(optimizer))
    inner_optimizers.check(optimizer)
    with discarded_on_error(optimizer), inner_optimizers.collected(optimizer):  # all of it, or none
        stays = dict.fromkeys(bookkeeping(optimizer).fp32, True) | left | dict(stays)
        chosen = _compile(optimizer, settings, stays, budget)
        bookkeeping(optimizer).budget, bookkeeping(optimizer).budgeted = budget, chosen.strategy
    external_writes.continue_from_others(optimizer)
    if bookkeeping(optimizer).leaving is None:
        low_words.leave_all(optimizer, bookkeeping(optimizer))
    if waiting:
        restore_low_words(optimizer, settled)


def _compile(
    optimizer: Optimizer, settings: Settings, stays: Mapping[torch.Tensor, bool], budget: int | None
) -> Settings:
    """Does it; returns the settings of the optimizer, with the strategy that the budget chose."""
    check_optimizer(optimizer)
    compiled = isinstance(optimizer, Compiled)
    base = base_of(type(optimizer)) if compiled else type(optimizer)
    if not compiled:
        _check_not_loaded(optimizer)
        aliased_memory.check_views(base, optimizer)
    known = dry_run.known(base, optimizer)
    records = replayed_steps.records(base, optimizer, known)
    bookkeeping(optimizer).following = None if known is None else dry_run.following(base, optimizer, known)
    settings = settings if budget is None else within(base, optimizer, settings, budget, records)
    chosen = _chosen(optimizer, settings)
    bookkeeping(optimizer).told -= {fallback_warning.SAID}
    plans, refusal = _plans(base, optimizer, chosen, known, records)
    if compiled:
        external_writes.drop_stale(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        warn_of_rounded(group["params"], i)
    if refusal is None:
        _tell(base, optimizer, plans, settings, chosen, stays, records)
    (change_settings if compiled else become_compiled)(optimizer, settings)
    visible_states.widen_counts(optimizer)
    for group, own, plan in zip(optimizer.param_groups, chosen, plans, strict=True):
        _write_settings(group, own, plan)
        for p, formats in _formats_of(optimizer, group, own, plan):
            _adopt(optimizer, p, dict.fromkeys(formats, FP32) if stays.get(p) else formats, compiled)
    params = params_of(optimizer)
    bookkeeping(optimizer).marks.states.clear()  # of what has been moved into other formats
    bookkeeping(optimizer).fp32 = {p for p in params if stays.get(p) and p.dtype == torch.float32}
    param_checks.remember(optimizer)
    group_settings.note_groups(optimizer)
    bookkeeping(optimizer).as_written = ""
    bookkeeping(optimizer).told -= {first_step_report.SAID, group_settings.BYTES}
    if refusal is not None and shape_of_part(optimizer) is None:  # of parts it is not known yet
        bookkeeping(optimizer).as_written = str(refusal)
    return settings


def _write_settings(group: dict[str, Any], own: Settings, plan: Plan) -> None:
    group.update(own.as_group())
    group.pop(UNSUPPORTED, None)
    if any(fmt.draw for fmt in plan[1].values()):
        group.setdefault(DRAWN, 0)  # torch.distributed.checkpoint reads what is in the state that it loads into


def _formats_of(
    optimizer: Optimizer, group: dict[str, Any], own: Settings, plan: Plan
) -> Iterator[tuple[torch.nn.Parameter, Mapping[str, Format]]]:
    """The parameters of a group, with their formats; of steps that run as written, those of the states there are."""
    recording, formats = plan
    for p in group["params"]:
        record, made = record_of(optimizer, p), bookkeeping(optimizer).as_made.get(p, ())
        if recording is None:
            formats = formats_as_written(own, p, optimizer.state.get(p, {}), record)
        yield p, {name: fmt for name, fmt in formats.items() if name in record or name not in made}


def _tell(
    base: type[Optimizer],
    optimizer: Optimizer,
    plans: Sequence[Plan],
    settings: Settings,
    chosen: Sequence[Settings],
    stays: Mapping[torch.Tensor, bool],
    records: Records,
) -> None:
    """Warns of what is lost: by a change of strategy, by words that are too short, and by steps that are too small."""
    if isinstance(optimizer, Compiled) and not bookkeeping(optimizer).as_written:
        _tell_of_change(base, optimizer, [of_group for _, of_group in plans], records)
    for i, (group, (recording, of_group), own) in enumerate(zip(optimizer.param_groups, plans, chosen, strict=True)):
        moved = [p for p in group["params"] if not stays.get(p)]
        if recording is not None and moved:
            strategy_checks.warn_imprecise(base, optimizer, recording.captured.graph, own, of_group)
            strategy_checks.warn_stuck(base, optimizer, recording, own, of_group)
            strategy_checks.Group(optimizer, i, own, compiled_class(base, settings)).check(moved, recording)


def _chosen(optimizer: Optimizer, settings: Settings) -> list[Settings]:
    """The settings of each group."""
    if isinstance(optimizer, Compiled):
        return [settings] * len(optimizer.param_groups)
    return [Settings.of(filled(group, settings.as_group())) for group in optimizer.param_groups]


def _plans(
    base: type[Optimizer],
    optimizer: Optimizer,
    chosen: Sequence[Settings],
    known: dry_run.Known | None,
    records: Records,
) -> tuple[Sequence[Plan], UnsupportedUpdate | None]:
    """The updates of all groups and the formats of their bf16 parameters; none, and why, if steps run as written."""
    try:
        plans = [_plan(base, g, s, records) for g, s in zip(optimizer.param_groups, chosen, strict=True)]
        rejections.check_states(optimizer)
        firsts = [(g, recording) for g, (recording, _) in zip(optimizer.param_groups, plans, strict=True)]
        shown = list(known.of_groups(optimizer)) if known is not None else firsts
        states = [(g, recording.captured.states) for g, recording in shown if recording is not None]
        strategy_checks.check_names(optimizer, [own.strategy for own in chosen], states, in_step=False)
    except UnsupportedUpdate as refusal:
        if known is not None and known.is_of_part:
            raise
        rejections.check(base, optimizer, refusal, chosen, is_known=known is None)
        check_sound(optimizer, chosen)
        rejections.check_states(optimizer)
        if shape_of_part(optimizer) is None:  # of parts it is not known yet
            fallback_warning.warn(base, optimizer, refusal)
        return [(None, {})] * len(chosen), refusal
    return plans, None


def _plan(base: type[Optimizer], group: dict[str, Any], settings: Settings, records: Records) -> Plan:
    """The update of a group, and the formats that its bf16 parameters will have; raises if it cannot be rewritten."""
    if not group["params"]:
        return None, {}
    p = group["params"][0]
    backend = choose(settings.backend, p.device)
    require_sound(backend, p.device, settings.strategy)
    with naming(base):
        recording = records(group, p)
        formats = update_formats.formats_of(recording, settings, torch.bfloat16)
        check_supported(backend, rewrite(recording.captured, formats, settings.arithmetic), p.device)
    return recording, formats


def _tell_of_change(
    base: type[Optimizer], optimizer: Optimizer, formats: Sequence[Mapping[str, Format]], records: Records
) -> None:
    """Warns of what is gained and lost if a compiled optimizer with states is compiled for other formats."""
    for i, (group, new) in enumerate(zip(optimizer.param_groups, formats, strict=True)):
        old = new
        with suppress(UnsupportedUpdate):  # its steps run as written
            _, old = _plan(base, group, Settings.of(group), records) if optimizer.state else (None, new)
        change = describe_change(optimizer, i, group["params"], old, new)
        if change:
            warn_user(change, StrategyChanged)


@torch.no_grad()
def _adopt(optimizer: Optimizer, p: torch.nn.Parameter, formats: Mapping[str, Format], compiled: bool) -> None:
    """Splits an fp32 parameter, and the states it already has, into the components of their formats."""
    drop_placeholders([optimizer.state[p]] if p in optimizer.state else [])
    formats = formats_of_shape(formats, p.dim())
    if p.dtype != torch.float32:
        _move(optimizer, p, formats, compiled)
        return
    if formats.get("param") is FP32 and not split_params({p: optimizer.state.get(p, {})}):
        return
    state, grad, record = optimizer.state[p], p.grad, record_of(optimizer, p)
    own = {k: v for k, v in state.items() if k in formats and not is_component(k, state)}
    # All states of a 0-d parameter are 0-d, and numbers of the step are not in `formats`.
    names = [k for k, v in own.items() if isinstance(v, torch.Tensor) and not (p.dim() and is_host_scalar(v, p))]
    p.grad = None
    settle(p, state)
    for name in [*names, "param"]:
        store(p, state, name, formats[name], read_exact(p, state, name, record), record)
    external_writes.remember(optimizer, p, external_writes.FRESH)
    if not state and p not in getattr(optimizer.state, "empty", ()):
        del optimizer.state[p]
    if grad is not None:
        p.grad = grad.to(p.dtype)


def _move(optimizer: Optimizer, p: torch.nn.Parameter, formats: Mapping[str, Format], compiled: bool) -> None:
    """Converts the existing states of a bf16 parameter to the new formats; before its first step it has none."""
    state = optimizer.state.get(p, {})
    if state:
        if not compiled:
            settle(p, state)
        has_words = compiled or bool(split_params({p: state}))  # else those of another optimizer may count
        for name in [*(name for name in formats if name in state), *(["param"] if has_words else [])]:
            ensure_stored(p, state, name, formats[name], record_of(optimizer, p))
        if has_words:  # low words from a file belong to weights from who knows where
            external_writes.remember(optimizer, p, "" if compiled else external_writes.LOADED)


def _check_not_loaded(optimizer: Optimizer) -> None:
    """Raises ValueError if torch loaded the checkpoint of a compiled run into an optimizer that was not compiled yet.

    It keeps keys that it does not know, without a warning, casts their tensors to the dtype of the parameter, and
    trains on with the first words alone.
    """
    # A user's group may name a strategy; only a checkpoint names all the settings at once.
    loaded = (g for g in optimizer.param_groups if all(key in g for key in KEYS))
    has_states = any(optimizer.state.get(p) for g in loaded for p in g["params"])
    if has_states or any(p.dtype == torch.float32 for p in split_params(optimizer.state)):
        raise ValueError(
            f"this {type(optimizer).__name__} loaded the checkpoint of a compiled run and was not compiled, so torch "
            "may have cast or used states whose formats it does not know; nothing was changed: compile first, with "
            "collage_neuron.compile(model, optimizer, ...), and load after that"
        )
