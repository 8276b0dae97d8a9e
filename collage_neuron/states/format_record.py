"""The record of formats: the format of each parameter and state, recorded when it is stored, and saved with it.

Keys do not determine formats: `exp_avg` and `exp_avg_lo` may be two bf16 words, or a bf16 word and an integer fraction
of its last place. The record is part of the optimizer's `Bookkeeping`, so that copies and pickles have it. Code that
only keeps `state` and `param_groups` (torch's state_dict, torch.distributed.checkpoint) finds it in the groups, under
`settings.FORMATS_KEPT`. Listed there are formats of users, since another process may know another format with the same
keys, and those that keys would give wrongly. Older checkpoints, and those of runs that need no record, have the keys
that they always had.

States whose words are shared by blocks are in checkpoints as their fp32 values, shaped and sharded like the parameter,
since blocks are those of the shard that a process has. Values can be sharded in another way, or read by plain torch,
and loading encodes them in the blocks that are there then: the same bits where blocks stay whole, and otherwise within
one rounding of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import BUILT_IN, FORMATS, FORMATS_KEPT
from collage_neuron.states.bookkeeping import bookkeeping, numbered
from collage_neuron.states.state_keys import is_shared_word, names_in
from collage_neuron.states.store import (
    Record,
    State,
    columns_of_record,
    damaged_record,
    format_by_keys,
    read_fp32,
    record_of,
    recorded_in_groups,
)


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
    put_back(optimizer, recorded_in_groups(optimizer))
    for p, fmt in own.items():
        record_of(optimizer, p)["param"] = fmt


def check_saved(group: Mapping[str, Any], index: int) -> list[dict[str, str]]:
    """Returns the record of each parameter of a group of a checkpoint; nothing of parameters in those without one.

    Raises:
        ValueError: a format is not registered, or the record is damaged.
    """
    columns = columns_of_record(group, index)
    if any(len(column) != len(group["params"]) for column in columns.values()):
        raise damaged_record(group, index)
    # Beside parameters in a format that is recorded, the others had none, or a single word.
    columns |= {"param": [fmt or "bf16" for fmt in columns["param"]]} if "param" in columns else {}
    return [{name: x for name, c in columns.items() if (x := c[i])} for i in range(len(group["params"]))]


def put_back(optimizer: Optimizer, records: Mapping[torch.Tensor, Record]) -> None:
    """Restores an earlier record."""
    recorded = bookkeeping(optimizer).formats
    kept_before = dict(records)
    recorded.clear()  # in place: an optimizer made by copy.copy shares it
    recorded.update(kept_before)


def _needed(optimizer: Optimizer, p: torch.Tensor) -> Mapping[str, str]:
    """The formats of the parameter and its states that are not built in, or that keys would give wrongly.

    And those of states in other shapes than its own: what has no format there, the optimizer made as it is.
    """
    record, state = bookkeeping(optimizer).formats.get(p, {}), optimizer.state.get(p, {})
    present = {name: fmt for name, fmt in record.items() if name in ("param", *state)}
    return {
        name: fmt
        for name, fmt in present.items()
        if not _is_known_by_keys(state, name, fmt) or _is_reshaped(state, name, p)
    }


def _is_reshaped(state: Mapping[str, Any], name: str, p: torch.Tensor) -> bool:
    value = state.get(name)
    return isinstance(value, torch.Tensor) and value.shape != p.shape and value.numel() == p.numel()


def _is_known_by_keys(state: Mapping[str, Any], name: str, fmt: str) -> bool:
    """Returns True if every process reads the keys of a value as this format, or its value is saved."""
    known = FORMATS.get(fmt)  # not if it was removed since: it is recorded all the same
    if known is not None and known.is_coded:
        return True
    return known is not None and known is BUILT_IN.get(fmt) and known.decode is format_by_keys(state, name).decode


# --- states of blocks -------------------------------------------------------------------------------------------------


PLACEHOLDER = 0
"""What stands for a shared word in a checkpoint.

torch.distributed.checkpoint reads a flattened state by the keys of the live one (`_unflatten_optim_state_dict`), so
each of them must be there.
"""


def show_values(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Replaces the words of coded states in what `Optimizer.state_dict` returned by their values."""
    for i, p in numbered(optimizer, packed).items():
        state = packed["state"].get(i)
        if isinstance(state, Mapping) and names_in(state).coded:
            packed["state"][i] = _with_values(optimizer, p, state)  # a new one: torch's is the live state itself


@torch.no_grad()
def _with_values(optimizer: Optimizer, p: torch.Tensor, state: Mapping[str, Any]) -> State:
    record, coded = record_of(optimizer, p), names_in(state).coded
    shown: State = {key: PLACEHOLDER if is_shared_word(key, state) else value for key, value in state.items()}
    for name in coded:
        shown[name] = read_fp32(p, state, name, record).to(p.device)
    return shown


def drop_placeholders(states: Iterable[State]) -> None:
    """Removes what stands for shared words in states that were loaded."""
    for state in states:
        for key in [k for k, v in state.items() if not isinstance(v, torch.Tensor) and is_shared_word(k, state)]:
            del state[key]
