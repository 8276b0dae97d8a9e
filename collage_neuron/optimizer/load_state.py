"""Loads a state into a compiled optimizer: all of it, exactly, or none of it.

torch builds the new state separately and installs it at the end. Our checks run before that, or the installation is
undone. So a truncated checkpoint, or one of another optimizer, raises and leaves everything as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager import rejections
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import Format, is_component
from collage_neuron.numerics.strategies import formats_of_shape, param_format
from collage_neuron.optimizer.load_checks import (
    Saved,
    begin_anew,
    check_saved,
    check_words,
    refuse_missing,
    settle_settings,
)
from collage_neuron.runtime import update_formats
from collage_neuron.runtime.fallback_warning import note
from collage_neuron.runtime.step_plan import Records
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, format_record, low_words, visible_states
from collage_neuron.states.bookkeeping import bookkeeping, mark_of, numbered, params_of
from collage_neuron.states.format_record import drop_placeholders
from collage_neuron.states.sharding import like
from collage_neuron.states.state_keys import is_host_scalar, split_params, split_words, words_of
from collage_neuron.states.store import ensure_stored, is_idle, record_of, settle
from collage_neuron.states.visible_states import buckets
from collage_neuron.trace import dry_run, replayed_steps


def load(base: type[Optimizer], optimizer: Optimizer, state_dict: Any, of_torch: Callable[[Any], None]) -> None:
    """Checks the state, runs `of_torch` (`Optimizer.load_state_dict`), and then restores what torch does not handle.

    torch casts every state to the dtype of its parameter. A wider state is restored as it was saved, and split into the
    words of its format. A plain torch checkpoint has no low words, so those of the parameters stay.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"an optimizer's state_dict() is a mapping, got {type(state_dict).__name__}")
    before = optimizer.state, optimizer.param_groups
    ours = bookkeeping(optimizer)
    formats, why = dict(ours.formats), ours.as_written
    seen: list[Saved] = []  # the state after the user's own load hooks, since ours runs last

    def check(_: Optimizer, saved: Any) -> None:
        check_saved(optimizer, saved, partial(_known_states, base, optimizer, saved))
        seen.append(saved)

    handle = optimizer.register_load_state_dict_pre_hook(check)
    try:
        of_torch(dict(state_dict))
        as_written = bool(bookkeeping(optimizer).as_written)
        drop_placeholders(optimizer.state.values())
        plain = settle_settings(optimizer, before[1])
        if as_written:
            _put_back_as_saved(optimizer, seen[0], plain)
        else:
            _put_back(optimizer, seen[0])
        visible_states.widen_counts(optimizer)
        kept, read = _keep_low_words(optimizer, before[0], plain)
        format_record.load(optimizer, kept | read)
        split = split_words(optimizer.state)
        joined = {p: (w, dict(record_of(optimizer, p))) for p, w in split.items() if p.dtype == torch.float32}
        if not as_written:  # its next step reads everything as it is, and stores it in its formats
            _settle_formats(base, optimizer, plain)
    except BaseException as error:
        optimizer.state, optimizer.param_groups = before
        format_record.put_back(optimizer, formats)
        ours.as_written = why
        if isinstance(error, KeyError) and seen:
            refuse_missing(base, error.args[0], seen[0], before[1])
        raise
    finally:
        handle.remove()
    ours.as_made.clear()  # torch casts what is loaded
    ours.joined = {p: (w, record, mark_of(p)) for p, (w, record) in joined.items()}
    begin_anew(optimizer, kept)


# --- after torch has put it in place ------------------------------------------------------------------------------


def _put_back(optimizer: Optimizer, saved: Saved) -> None:
    """States as torch does not load them: wider ones in fp32, integers as they are, sharded as the parameter is.

    One that several parameters have is one afterwards.
    """
    made: Made = {}
    for index, p in numbered(optimizer, saved).items():
        for key, word in words_of(optimizer.state.get(p, {})).items():  # weights share no memory with what was loaded,
            optimizer.state[p][key] = word.clone()  # as torch's do not, and states of the same type do
        for name, value in saved["state"].get(index, {}).items():
            if isinstance(value, (list, tuple, dict)):  # torch has cast the tensors in it
                optimizer.state[p][name] = _own(value, p, made)
            if not isinstance(value, torch.Tensor):
                continue
            is_small = name in bookkeeping(optimizer).small and p.dim() > 0
            scalar = is_host_scalar(value, p) and not (is_small or is_component(name, saved["state"][index]))
            if value.is_floating_point() and (value.dtype != torch.bfloat16 or is_small):
                device, dtype = (value.device, value.dtype) if scalar else (p.device, torch.float32)
                optimizer.state[p][name] = _copy(value, device, dtype, made)
            elif not value.is_floating_point() and not scalar:
                optimizer.state[p][name] = value.detach().to(p.device, copy=True)
            elif optimizer.state[p].get(name) is value:  # one word of several: it may be loaded again, as it is
                optimizer.state[p][name] = _copy(value, value.device, value.dtype, made)
            if not scalar:
                optimizer.state[p][name] = like(optimizer.state[p][name], p)


def _keep_low_words(
    optimizer: Optimizer, before: Mapping[Any, Any], plain: list[bool]
) -> tuple[set[torch.Tensor], set[torch.Tensor]]:
    """Keeps low words of parameters for which the checkpoint has none; returns these, and those whose words it has.

    Not of weights that were written, unless it is known what they were: the next step then looks which words fit.
    torch.distributed.checkpoint reads into the words that are there, and then gives no states of frozen parameters.

    A checkpoint of a compiled optimizer has them for each parameter that took a step.
    """
    split, kept, read = split_params(optimizer.state), set[torch.Tensor](), set[torch.Tensor]()
    for group, of_torch in zip(optimizer.param_groups, plain, strict=True):
        for p in group["params"]:
            own = words_of(before.get(p, {}))
            expected = p in split or not (of_torch or is_idle(optimizer.state.get(p, {})))
            noted = low_words.low_words_of(optimizer, p)
            is_read = noted.words.keys() == own.keys() and noted.is_overwritten()
            if own and not expected and (is_read or noted.bits is not None or not noted.is_written(p)):
                optimizer.state[p].update(own)
                (read if is_read else kept).add(p)
    return kept, read


def _settle_formats(base: type[Optimizer], optimizer: Optimizer, plain: list[bool], is_new: bool = False) -> None:
    """Stores every state in its format. For that the next step is recorded, which also shows missing states.

    One that `is_new`, and was not saved, may lack words.
    """
    records = replayed_steps.records(base, optimizer, dry_run.known(base, optimizer))
    names = {p: f"state[{i}]" for i, p in enumerate(params_of(optimizer))}
    for group, of_torch in zip(optimizer.param_groups, plain, strict=True):
        stepped = [p for p in group["params"] if not is_idle(optimizer.state.get(p, {}))]
        for p in [] if of_torch or is_new else split_params(optimizer.state) & set(group["params"]):
            param = {"param": param_format(Settings.of(group).strategy, p.dtype)}
            check_words(optimizer.state[p], param, names[p])
            _narrow_words(optimizer.state[p], param["param"])
        if group["params"] and not (stepped or is_new):
            _formats(optimizer, group, group["params"][0], records)  # the settings may be those of another optimizer
        for params in buckets(optimizer, stepped):
            of_bucket = _formats(optimizer, group, params[0], records)
            for p in params:
                state, formats = optimizer.state[p], formats_of_shape(of_bucket, p.dim())
                if not (of_torch or is_new):
                    check_words(state, formats, names[p])
                settle(p, state)
                for name, fmt in formats.items():
                    if name in state or (name == "param" and not of_torch):
                        ensure_stored(p, state, name, fmt, record_of(optimizer, p))


def _narrow_words(state: dict[str, Any], fmt: Format) -> None:
    """Casts further words of a parameter back that a plain fp32 optimizer has widened.

    With their own types they stay as they are, and may be loaded before the parameter, to which others would be added.
    """
    for key, component in [*zip(fmt.keys("param"), fmt.components, strict=True)][1:]:
        state[key] = state[key].to(component.type.dtype)


def settle_new(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Stores the states that an optimizer created in its constructor (Adagrad) in their formats, as in checkpoints."""
    if not optimizer.state or any(p.is_meta for p in params_of(optimizer)):
        return
    with suppress(KeyError):  # its step needs what is not there yet
        _settle_formats(base, optimizer, [False] * len(optimizer.param_groups), is_new=True)
    for p in split_params(optimizer.state):
        external_writes.remember(optimizer, p, external_writes.FRESH)


def _formats(optimizer: Optimizer, group: dict[str, Any], p: Any, records: Records) -> Mapping[str, Format]:
    """The storage formats of the next step; none if it is not known (an optimizer in evaluation mode).

    Raises:
        KeyError: the step needs a state that is missing.
    """
    try:
        recording = records(group, p)
    except UnsupportedUpdate as error:
        if isinstance(error.__cause__, KeyError):
            raise error.__cause__ from None
        return {}
    formats = update_formats.formats_of(recording, Settings.of(group), p.dtype)
    idle = update_formats.idle_formats(optimizer, p, recording)
    # A state of blocks was saved as its value, which is not the format that it had.
    return {**formats, **{name: fmt for name, fmt in idle.items() if not formats[name].is_coded}}


# --- states of steps that run as written: whatever the optimizer made, as it was saved --------------------------------


def _known_states(base: type[Optimizer], optimizer: Optimizer, saved: Saved) -> set[str] | None:
    """The states of its steps, by name; None if these run as written, or will with the settings of a checkpoint.

    Before its first step, an optimizer may not have said so. Then the names of its states in other shapes than their
    parameter are not known either, and are learned here.
    """
    known = dry_run.known(base, optimizer)  # of the next step, where it is traced
    records = replayed_steps.records(base, optimizer, known)
    ours, own = bookkeeping(optimizer), [Settings.of(group) for group in optimizer.param_groups]
    pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    try:
        settings = [Settings.of({**mine, **of_run}) for mine, of_run in pairs]
    except ValueError:  # which is said of the group when it is loaded
        settings = own
    alike = list(map(_deciding, own)) == list(map(_deciding, settings))
    names = {name for state in optimizer.state.values() for name in state}
    if known is None:  # it is recorded: classes of torch have no other states in later steps
        names.update(name for state in saved["state"].values() if isinstance(state, Mapping) for name in state)
    if alike and (ours.as_written or (ours.steps and known is None)):
        return None if ours.as_written else names
    ours.as_written = ""
    for _, recording in () if known is None else known.of_groups(optimizer):
        visible_states.learn(ours, recording.captured)
        names |= set(recording.captured.states)
    try:
        for group in optimizer.param_groups:
            if group["params"]:
                names |= set(records(group, group["params"][0]).captured.states)
    except UnsupportedUpdate as refusal:
        with suppress(UnsupportedUpdate):
            rejections.check(base, optimizer, refusal, settings)
            # One that has modes may have raised an error of its own because it is in evaluation mode.
            if refusal.__cause__ is None or not hasattr(optimizer, "train"):
                note(base, optimizer, refusal)
    ours.as_written = ours.as_written or _no_update_keeps(saved, names)
    return None if ours.as_written else names


def _no_update_keeps(saved: Saved, known: set[str]) -> str:
    """What a checkpoint has that only a step as written can have made: truth values, or counts of elements."""
    for state in saved["state"].values():
        for name, x in state.items() if isinstance(state, Mapping) else ():
            is_plain = isinstance(x, torch.Tensor) and x.dim() > 0 and x.dtype in (torch.bool, torch.int32, torch.int64)
            if is_plain and name not in known and not is_component(name, state):
                return f"the checkpoint has a state {name!r} in {x.dtype}"
    return ""


def _deciding(settings: Settings) -> tuple[object, ...]:
    """The settings that decide whether steps run as written."""
    return settings.strategy, settings.arithmetic, settings.backend


def _put_back_as_saved(optimizer: Optimizer, saved: Mapping[str, Any], plain: Sequence[bool]) -> None:
    """Restores the states in their own types: torch casts all floating tensors to the type of the parameter.

    In groups that are of `plain` torch a state in bf16 is so because its parameter was, and is one in fp32 now.
    """
    params, made = numbered(optimizer, saved), Made()
    for index, state in saved["state"].items():
        p = params.get(index)
        if p is None:
            optimizer.state[index] = copy.deepcopy(state)
        else:
            optimizer.state[p].update({k: _own(v, p, made) for k, v in state.items()})
    for group in compress(optimizer.param_groups, plain):
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            tensors = {k: x for k, x in state.items() if isinstance(x, torch.Tensor)}
            narrow = {k: x for k, x in tensors.items() if x.dtype == torch.bfloat16 and x.shape != p.shape}
            state.update({k: x.float() for k, x in narrow.items()})
    drop_placeholders([optimizer.state[p] for p in params.values() if p in optimizer.state])


Made = dict[tuple[int, torch.device, torch.dtype], torch.Tensor]
"""The copies of tensors: one that several states have is one afterwards."""


def _copy(x: torch.Tensor, device: torch.device, dtype: torch.dtype, made: Made) -> torch.Tensor:
    key = id(x), device, dtype
    if key not in made:
        made[key] = x.detach().to(device, dtype, copy=True)
    return made[key]


def _own(x: Any, p: torch.Tensor, made: Made) -> Any:
    """A copy of what a checkpoint has; tensors that are no numbers are on the device of the parameter."""
    if isinstance(x, torch.Tensor):
        return _copy(x, p.device if x.dim() else x.device, x.dtype, made)
    if type(x) is dict:
        return {k: _own(v, p, made) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_own(y, p, made) for y in x)
    return copy.deepcopy(x)
