"""Loads a state into a compiled optimizer: all of it, exactly, or none of it.

torch builds the new state separately and installs it at the end. Our checks run before that, or the installation is
undone. So a truncated checkpoint, or one of another optimizer, raises and leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import NO_ROLES, formats_for, formats_of_shape
from collage_neuron.optimizer import load_as_written
from collage_neuron.optimizer.loaded import begin_anew, refused, settle_settings
from collage_neuron.runtime import update_formats
from collage_neuron.runtime.plan import Records
from collage_neuron.settings import KEYS, Settings
from collage_neuron.states import external_writes, format_record, joined_words, reduced_states, step_counts
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.format_record import drop_placeholders, record_of
from collage_neuron.states.sharding import is_sharded, like
from collage_neuron.states.state_keys import is_component, name_of, split_params, suffixes
from collage_neuron.states.store import ensure_stored, is_host_scalar, is_idle, may_be_word, settle
from collage_neuron.states.visible_states import buckets
from collage_neuron.trace import dry_run

Saved = Mapping[str, Any]


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
        check_saved(optimizer, saved, partial(_runs_as_written, base, optimizer, saved))
        seen.append(saved)

    handle = optimizer.register_load_state_dict_pre_hook(check)
    try:
        of_torch(dict(state_dict))
        as_written = bool(bookkeeping(optimizer).as_written)
        drop_placeholders(optimizer.state.values())
        plain = settle_settings(optimizer, before[1])
        format_record.load(optimizer)
        if as_written:
            load_as_written.put_back(optimizer, seen[0], plain)
        else:
            _put_back(optimizer, seen[0])
        step_counts.widen(optimizer)
        kept = _keep_low_words(optimizer, before[0], plain)
        format_record.keep(optimizer, kept, formats)
        joined = joined_words.loaded(optimizer)
        if not as_written:  # its next step reads everything as it is, and stores it in its formats
            _settle_formats(base, optimizer, plain)
    except BaseException as error:
        optimizer.state, optimizer.param_groups = before
        format_record.put_back(optimizer, formats)
        ours.as_written = why
        if isinstance(error, KeyError) and seen:
            _refuse_missing(base, error.args[0], seen[0], before[1])
        raise
    finally:
        handle.remove()
    joined_words.note(optimizer, joined)
    begin_anew(optimizer, kept)


# --- before torch reads it ----------------------------------------------------------------------------------------


def check_keys(saved: Saved) -> None:
    """Raises ValueError if `saved` is not the state of any optimizer."""
    for key in ("state", "param_groups"):
        if key not in saved:
            found = ", ".join(map(repr, list(saved)[:5]))
            raise refused(f"it has no {key!r}; found {found or 'nothing'}: is it an optimizer's state_dict()?")


def _runs_as_written(base: type[Optimizer], optimizer: Optimizer, saved: Saved) -> bool:
    known = dry_run.known(base, optimizer)
    return load_as_written.runs_as_written(base, optimizer, saved, known, dry_run.records(base, optimizer, known))


def check_saved(optimizer: Optimizer, saved: Saved, runs_as_written: Callable[[], bool] = lambda: False) -> None:
    """Raises ValueError, naming the key, if `saved` cannot be a state of `optimizer`.

    One whose steps run as written may keep anything in a state.
    """
    check_keys(saved)
    groups, own = saved["param_groups"], optimizer.param_groups
    if len(groups) != len(own):
        raise refused(f"it has {len(groups)} param_groups and the optimizer {len(own)}")
    params: dict[Any, torch.Tensor] = {}
    for i, (group, mine) in enumerate(zip(groups, own, strict=True)):
        if "params" not in group:
            raise refused(f"param_groups[{i}] has no 'params'")
        if len(group["params"]) != len(mine["params"]):
            raise refused(
                f"param_groups[{i}] has {len(group['params'])} parameters and the optimizer's {len(mine['params'])}"
            )
        format_record.check_saved(group, i)
        params |= zip(group["params"], mine["params"], strict=True)
    as_written = runs_as_written()
    for index, state in saved["state"].items():
        if as_written:
            continue
        if index not in params:
            raise refused(f"state[{index!r}] belongs to none of its param_groups")
        _check_state(params[index], index, state, bookkeeping(optimizer))


def _check_state(p: torch.Tensor, index: Any, state: Any, ours: Bookkeeping) -> None:
    """Raises for a state that cannot be that of `p`."""
    where = f"state[{index!r}]"
    if not isinstance(state, Mapping):
        raise refused(f"{where} is a {type(state).__name__} and not a mapping of names to values")
    for key, value in state.items():
        unlike = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != p.shape
        if unlike and not reduced_states.may_be_state(name_of(key, state), value, p, ours):
            raise refused(
                f"{where}[{key!r}] has shape {list(value.shape)} and the parameter {list(p.shape)}: is it the "
                "checkpoint of another model, or are the parameters in another order?"
            )
        if isinstance(value, torch.Tensor) and value.dim() > 0 and is_sharded(value) != is_sharded(p):
            raise refused(
                f"{where}[{key!r}] is {'' if is_sharded(value) else 'not '}sharded and the parameter is "
                f"{'' if is_sharded(p) else 'not '}(DTensor): use set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict"
            )
        if isinstance(value, torch.Tensor) and value.dim() > 0 and not may_be_word(key, value):
            raise refused(f"{where}[{key!r}] is {value.dtype}; states are floating-point")
        for suffix in suffixes():
            name = str(key).removesuffix(suffix)
            if str(key).endswith(suffix) and name != "param" and name not in state:
                raise refused(f"{where} has {key!r} and not {name!r}, which it is the second word of")


def _refuse_missing(base: type[Optimizer], key: Any, saved: Saved, own: list[dict[str, Any]]) -> None:
    """Raises for a key that the optimizer's own code did not find, if the checkpoint should have had it."""
    places = {f"param_groups[{i}]": group for i, group in enumerate(saved["param_groups"]) if key in own[i]}
    places |= {f"state[{i!r}]": state for i, state in saved["state"].items() if not is_idle(state)}
    for where, found in places.items():
        if key not in found:
            names = ", ".join(str(k) for k in found if k not in KEYS and not is_component(k, found))
            raise refused(
                f"{where} has no {key!r}, which {base.__name__} needs; it has {names}: is it truncated, or the "
                "checkpoint of another optimizer?"
            )


# --- after torch has put it in place ------------------------------------------------------------------------------


def _params(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _put_back(optimizer: Optimizer, saved: Saved) -> None:
    """States as torch does not load them: wider ones in fp32, integers as they are, sharded as the parameter is."""
    ids = (i for group in saved["param_groups"] for i in group["params"])
    for index, p in zip(ids, _params(optimizer), strict=True):
        for name, value in saved["state"].get(index, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            is_small = name in bookkeeping(optimizer).small and p.dim() > 0
            scalar = is_host_scalar(value, p) and not (is_small or is_component(name, saved["state"][index]))
            if value.is_floating_point() and (value.dtype != torch.bfloat16 or is_small):
                device, dtype = (value.device, value.dtype) if scalar else (p.device, torch.float32)
                optimizer.state[p][name] = value.detach().to(device, dtype, copy=True)
            elif not value.is_floating_point() and not scalar:
                optimizer.state[p][name] = value.detach().to(p.device, copy=True)
            if not scalar:
                optimizer.state[p][name] = like(optimizer.state[p][name], p)


def _keep_low_words(optimizer: Optimizer, before: Mapping[Any, Any], plain: list[bool]) -> set[torch.Tensor]:
    """Keeps low words of parameters for which the checkpoint has none; returns these.

    Not of weights that were written, unless it is known what they were: the next step then looks which words fit.

    A checkpoint of a compiled optimizer has them for each parameter that took a step.
    """
    split, kept = split_params(optimizer.state), set()
    for group, of_torch in zip(optimizer.param_groups, plain, strict=True):
        for p in group["params"]:
            own = {k: v for k, v in before.get(p, {}).items() if k in ["param" + suffix for suffix in suffixes()]}
            expected = p in split or not (of_torch or is_idle(optimizer.state.get(p, {})))
            known = p in bookkeeping(optimizer).param_bits or not external_writes.is_written(optimizer, p)
            if own and not expected and known:
                optimizer.state[p].update(own)
                kept.add(p)
    return kept


def _settle_formats(base: type[Optimizer], optimizer: Optimizer, plain: list[bool]) -> None:
    """Stores every state in its format. For that the next step is recorded, which also shows missing states."""
    records = dry_run.foreseen(base, optimizer)
    names = {p: f"state[{i}]" for i, p in enumerate(_params(optimizer))}
    for group, of_torch in zip(optimizer.param_groups, plain, strict=True):
        stepped = [p for p in group["params"] if not is_idle(optimizer.state.get(p, {}))]
        for p in [] if of_torch else split_params(optimizer.state) & set(group["params"]):
            _check_words(optimizer.state[p], formats_for(Settings.of(group).strategy, (), NO_ROLES, p.dtype), names[p])
        if group["params"] and not stepped:
            _formats(optimizer, group, group["params"][0], records)  # the settings may be those of another optimizer
        for params in buckets(optimizer, stepped):
            of_bucket = _formats(optimizer, group, params[0], records)
            for p in params:
                state, formats = optimizer.state[p], formats_of_shape(of_bucket, p.dim())
                if not of_torch:
                    _check_words(state, formats, names[p])
                settle(p, state)
                for name, fmt in formats.items():
                    if name in state or (name == "param" and not of_torch):
                        ensure_stored(p, state, name, fmt, 0.0, record_of(optimizer, p))


def settle_new(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Stores the states that an optimizer created in its constructor (Adagrad) in their formats, as in checkpoints."""
    if not optimizer.state or any(p.is_meta for p in _params(optimizer)):
        return
    records = dry_run.foreseen(base, optimizer)
    for group in optimizer.param_groups:
        filled = [p for p in group["params"] if not is_idle(optimizer.state.get(p, {}))]
        for params in buckets(optimizer, filled):
            formats: Mapping[str, Format] = {}
            with suppress(KeyError):  # its step needs what is not there yet
                formats = _formats(optimizer, group, params[0], records)
            for p, name in product(params, formats):
                fmt = formats_of_shape(formats, p.dim())[name]
                if name == "param" or name in optimizer.state[p]:
                    ensure_stored(p, optimizer.state[p], name, fmt, 0.0, record_of(optimizer, p))
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


def _check_words(state: Mapping[str, Any], formats: Mapping[str, Format], where: str) -> None:
    """Raises if a checkpoint of a compiled optimizer lacks a word of a format, or has whole numbers for others."""
    for name, fmt in formats.items():
        high = state.get(name)
        if name != "param" and (high is None or high.dtype != fmt.components[0].type.dtype):
            continue  # a state of a later step; or wider than its format: nothing is lost
        for key, component in list(zip(fmt.keys(name), fmt.components, strict=True))[1:]:
            if key in state and not _is_misread(name, state[key].dtype, component.type.dtype):
                continue
            found = f"{key!r} in {state[key].dtype}" if key in state else f"no {key!r}"
            raise refused(
                f"{where} has {found}, the low word of {name!r} under this group's strategy: was it read "
                "into the template of an optimizer compiled for another strategy, or saved by a run that left this "
                "parameter in fp32 (compile(..., keep_fp32=...), buffers=)? Compile as that run did"
            )


def _is_misread(name: str, stored: torch.dtype, dtype: torch.dtype) -> bool:
    """Returns True if a word of `dtype` went through another one that does not hold it, or holds something else.

    The strategy alone tells the format of a parameter. That of a state depends on its role, which may have been another
    when it was stored: either integer may be right.
    """
    alike = stored.is_floating_point == dtype.is_floating_point
    return stored != dtype and not (alike and (name != "param" or dtype.is_floating_point))
