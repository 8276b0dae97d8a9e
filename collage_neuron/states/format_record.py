"""The record of formats: the format of each parameter and state, recorded when it is stored, and saved with it.

Keys do not determine formats: `exp_avg` and `exp_avg_lo` may be two bf16 words, or a bf16 word and an integer fraction
of its last place. The record is part of the optimizer's `Bookkeeping`, so that copies and pickles have it. Code that
only keeps `state` and `param_groups` (torch's state_dict, torch.distributed.checkpoint) finds it in the groups, under
`settings.FORMATS_KEPT`. Listed there are formats of users, since another process may know another format with the same
keys, those that keys would give wrongly, and states in no format (`AS_MADE`), as steps as written leave them, which
loading would take for words, or for states of another model: in other types and shapes, or called as words are. Older
checkpoints, and those of runs that need no record, have the keys that they always had.

States whose words are shared by blocks are in checkpoints as their fp32 values, shaped and sharded like the parameter,
since blocks are those of the shard that a process has. Values can be sharded in another way, or read by plain torch,
and loading encodes them in the blocks that are there then: the same bits where blocks stay whole, and otherwise within
one rounding of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics import formats
from collage_neuron.numerics.formats import BUILT_IN, FORMATS
from collage_neuron.settings import FORMATS_KEPT
from collage_neuron.states.bookkeeping import bookkeeping, numbered
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import is_shared_word, names_in, suffixes
from collage_neuron.states.store import NOT_STEPPED, Record, State, format_by_keys, is_idle, is_number, read_fp32

AS_MADE = "as made"
"""What stands in the groups for the format of a state that has none: it is kept as a step as written left it."""


def record_of(optimizer: Optimizer, p: torch.Tensor) -> Record:
    """The record of the parameter `p`, which callers write to: format names by state name, and by `param`."""
    recorded = bookkeeping(optimizer).formats
    record = recorded.get(p)
    if record is None:
        record = recorded[p] = _saved(optimizer).get(p, {})
    return record


def save(optimizer: Optimizer) -> None:
    """Writes the record to the groups, for code that keeps nothing else."""
    for group in optimizer.param_groups:
        records = [_needed(optimizer, p) for p in group["params"]]
        names = sorted({name for record in records for name in record})
        if names:
            columns = {name: [record.get(name) for record in records] for name in names}
            # One name if all parameters have the same, which is the usual case.
            shown = {name: column[0] if len(set(column)) == 1 else column for name, column in columns.items()}
            group[FORMATS_KEPT] = json.dumps(shown)
        else:
            group.pop(FORMATS_KEPT, None)


def load(optimizer: Optimizer, kept: Iterable[torch.Tensor] = ()) -> None:
    """Reads the record from the groups, where a checkpoint has put it; empty for checkpoints that are older than it.

    Those that have `kept` their own words while states were loaded keep the format of these.
    """
    before = bookkeeping(optimizer).formats
    own = {p: before[p]["param"] for p in kept if "param" in before.get(p, {})}
    put_back(optimizer, _saved(optimizer))
    for p, fmt in own.items():
        record_of(optimizer, p)["param"] = fmt


def check_saved(group: Mapping[str, Any], index: int) -> list[Record]:
    """Returns the record of each parameter of a group of a checkpoint.

    Raises:
        ValueError: a format is not registered, or the record is damaged.
    """
    columns = _columns(group, index)
    if any(len(column) != len(group["params"]) for column in columns.values()):
        raise _damaged(group, index)
    # Beside parameters in a format that is recorded, the others had none, or a single word.
    if "param" in columns:
        columns["param"] = [fmt or "bf16" for fmt in columns["param"]]
    return _by_params(columns, len(group["params"]))


def put_back(optimizer: Optimizer, records: Mapping[torch.Tensor, Record]) -> None:
    """Restores an earlier record."""
    recorded = bookkeeping(optimizer).formats
    kept_before = dict(records)
    recorded.clear()  # in place: an optimizer made by copy.copy shares it
    recorded.update(kept_before)


def _needed(optimizer: Optimizer, p: torch.Tensor) -> Mapping[str, str]:
    """The formats of the parameter and its states that are not built in, or that keys would give wrongly.

    And those of states in other shapes than its own, and what is in no format.
    """
    ours, state = bookkeeping(optimizer), optimizer.state.get(p, {})
    record = ours.formats.get(p, {})
    present = {name: fmt for name, fmt in record.items() if name in ("param", *state)}
    return {
        name: fmt
        for name, fmt in present.items()
        if not _is_known_by_keys(state, name, fmt) or _is_reshaped(state, name, p) or _is_called_as_word(name)
    } | {k: AS_MADE for k in names_in(state).own if k not in record and _is_as_made(k, state[k], p, k in ours.small)}


def _is_called_as_word(name: object) -> bool:
    return isinstance(name, str) and name != "param" and name.endswith(tuple(suffixes()))


def _is_as_made(name: Any, x: object, p: torch.Tensor, is_small: bool) -> bool:
    """Returns True for a state in no format that looks like a word, or like none that an update leaves behind."""
    if not isinstance(name, str) or not isinstance(x, torch.Tensor) or not x.dim():
        return False
    return _is_called_as_word(name) or x.dtype != torch.float32 or (x.shape != p.shape and not is_small)


def _is_reshaped(state: Mapping[str, Any], name: str, p: torch.Tensor) -> bool:
    value = state.get(name)
    return isinstance(value, torch.Tensor) and value.shape != p.shape and value.numel() == p.numel()


def _is_known_by_keys(state: Mapping[str, Any], name: str, fmt: str) -> bool:
    """Returns True if every process reads the keys of a value as this format, or its value is saved."""
    known = FORMATS.get(fmt)  # not if it was removed since: it is recorded all the same
    if known is not None and known.is_coded:
        return True
    return known is not None and known is BUILT_IN.get(fmt) and known.decode is format_by_keys(state, name).decode


def _saved(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, str]]:
    """The record of each parameter as the groups have it.

    It is one string per group: checkpoints that store each leaf under its own key would split a mapping, and then
    require the same keys in every template.
    """
    records: dict[torch.Tensor, dict[str, str]] = {}
    for i, group in enumerate(optimizer.param_groups):
        columns = _columns(group, i) if FORMATS_KEPT in group else {}  # of many groups mostly none has one
        for p, record in zip(group["params"], _by_params(columns, len(group["params"])), strict=True):
            if found := {name: fmt for name, fmt in record.items() if fmt != AS_MADE}:
                records[p] = found
    return records


def _by_params(columns: Mapping[str, Sequence[str | None]], count: int) -> list[Record]:
    """The record of each of `count` parameters; columns may be shorter in groups to which some were added."""
    return [{k: x for k, c in columns.items() if (x := c[i] if i < len(c) else None) is not None} for i in range(count)]


def _columns(group: Mapping[str, Any], index: int) -> dict[str, list[str | None]]:
    """The record of a group: by state the names of the formats, one for each parameter.

    Raises:
        ValueError: it is something else, as in a damaged checkpoint, or a format is not registered.
    """
    try:
        written = json.loads(group.get(FORMATS_KEPT, "{}"))
    except (TypeError, ValueError):
        written = None
    if not isinstance(written, dict):
        raise _damaged(group, index)
    columns: dict[str, Any] = {k: [x] * len(group["params"]) if isinstance(x, str) else x for k, x in written.items()}
    if not all(isinstance(x, list) and all(fmt is None or isinstance(fmt, str) for fmt in x) for x in columns.values()):
        raise _damaged(group, index)
    for name in sorted({fmt for column in columns.values() for fmt in column if fmt is not None} - {AS_MADE}):
        formats.require_known(name, f"param_groups[{index}] has states that were")
    return columns


def _damaged(group: Mapping[str, Any], index: int) -> ValueError:
    return ValueError(
        f"param_groups[{index}][{FORMATS_KEPT!r}] is {group[FORMATS_KEPT]!r}, and not the record of formats that "
        "state_dict() writes (a JSON object: the name of a format by state, or a list of them, one for each "
        "parameter): it is damaged"
    )


# --- states of blocks -------------------------------------------------------------------------------------------------


PLACEHOLDER = 0
"""What stands for a shared word in a checkpoint.

torch.distributed.checkpoint reads a flattened state by the keys of the live one (`_unflatten_optim_state_dict`), so
each of them must be there.
"""


def show_values(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Replaces the words of coded states in what `Optimizer.state_dict` returned by their values.

    States of nothing but low words (of frozen parameters) get numbers: a plain optimizer of torch's classes looks for
    `step`, `eta` or others in each state that it loads.
    """
    looks = getattr(type(optimizer), "_collage_base", Optimizer).__setstate__ is not Optimizer.__setstate__
    has_idle = any(isinstance(state, Mapping) and state and is_idle(state) for state in packed["state"].values())
    numbers = dict.fromkeys(_numbers(packed["state"].values()) if looks and has_idle else (), NOT_STEPPED)
    for i, p in numbered(optimizer, packed).items():
        state = packed["state"].get(i)
        if isinstance(state, Mapping) and names_in(state).coded:
            packed["state"][i] = _with_values(optimizer, p, state)  # a new one: torch's is the live state itself
        elif numbers and state and isinstance(state, Mapping) and is_idle(state):
            packed["state"][i] = {**state, **numbers}


def _numbers(states: Iterable[Any]) -> list[str]:
    """The names of the numbers in a state after a step; none if there was no step but that of a template.

    torch.distributed.checkpoint takes one with gradients of zero, and requires the keys of the template in the
    checkpoints that it reads: older ones have no numbers beside low words.
    """
    tensors = (((state, state[k]) for k in names_in(state).own) for state in states if isinstance(state, Mapping))
    stepped = next((s for s, x in chain.from_iterable(tensors) if _is_of_elements(x) and _has_moved(x)), {})
    return [key for key, x in stepped.items() if is_number(x)]


def _is_of_elements(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0


def _has_moved(x: torch.Tensor) -> bool:
    return bool(local(x.detach()).cpu().any())  # on the host: a lazy device would compile it


@torch.no_grad()
def _with_values(optimizer: Optimizer, p: torch.Tensor, state: Mapping[str, Any]) -> State:
    record, coded = record_of(optimizer, p), names_in(state).coded
    shown: State = {key: PLACEHOLDER if is_shared_word(key, state) else value for key, value in state.items()}
    for name in coded:
        shown[name] = read_fp32(p, state, name, record).to(p.device)
    return shown


def drop_placeholders(states: Iterable[State]) -> None:
    """Removes what stands for shared words and for numbers in states that were loaded."""
    for state in states:
        for key in [k for k, v in state.items() if not isinstance(v, torch.Tensor) and is_shared_word(k, state)]:
            del state[key]
        if is_idle(state):
            for key in names_in(state).own:
                del state[key]
