"""The record of formats: the format of each parameter and state, recorded when it is stored, and saved with it.

Keys do not determine formats: `exp_avg` and `exp_avg_lo` may be two bf16 words, or a bf16 word and an integer fraction
of its last place. The record is part of the optimizer's `Bookkeeping`, so that copies and pickles have it. Code that
only keeps `state` and `param_groups` (torch's state_dict, torch.distributed.checkpoint) finds it in the groups, under
`settings.FORMATS_KEPT`. Only formats that keys would give wrongly are listed there, so that older checkpoints, and
those of runs that need no record, have the keys that they always had.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import FORMATS
from collage_neuron.settings import FORMATS_KEPT
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.store import Record, told_by_keys


def of(optimizer: Optimizer, p: torch.Tensor) -> Record:
    """The record of the parameter `p`, which callers write to: format names by state name, and by `param`."""
    kept = bookkeeping(optimizer).formats
    record = kept.get(p)
    if record is None:
        record = kept[p] = _saved(optimizer).get(p, {})
    return record


def save(optimizer: Optimizer) -> None:
    """Writes the record to the groups, for code that keeps nothing else."""
    for group in optimizer.param_groups:
        records = [_needed(optimizer, p) for p in group["params"]]
        names = sorted({name for record in records for name in record})
        if names:
            columns = {name: [record.get(name) for record in records] for name in names}
            group[FORMATS_KEPT] = json.dumps({name: _short(column) for name, column in columns.items()})
        else:
            group.pop(FORMATS_KEPT, None)


def load(optimizer: Optimizer) -> None:
    """Reads the record from the groups, where a checkpoint has put it; empty for checkpoints that are older than it."""
    put_back(optimizer, _saved(optimizer))


def put_back(optimizer: Optimizer, records: Mapping[torch.Tensor, Record]) -> None:
    """Restores an earlier record."""
    kept = bookkeeping(optimizer).formats
    kept_before = dict(records)
    kept.clear()  # in place: an optimizer made by copy.copy shares it
    kept.update(kept_before)


def keep(optimizer: Optimizer, params: Collection[torch.Tensor], before: Mapping[torch.Tensor, Record]) -> None:
    """Restores the record of `params` themselves, whose words were kept while states were loaded."""
    for p in params:
        of(optimizer, p).update({name: fmt for name, fmt in before.get(p, {}).items() if name == "param"})


def replace(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Moves the record of `old` to `new`, which replaces it."""
    kept = bookkeeping(optimizer).formats
    if old in kept:
        kept[new] = kept.pop(old)


def _needed(optimizer: Optimizer, p: torch.Tensor) -> Mapping[str, str]:
    """The formats of the parameter and its states that keys would give wrongly."""
    record, state = bookkeeping(optimizer).formats.get(p, {}), optimizer.state.get(p, {})
    present = {name: FORMATS[fmt] for name, fmt in record.items() if fmt in FORMATS and name in ("param", *state)}
    return {name: fmt.name for name, fmt in present.items() if fmt.decode is not told_by_keys(state, name).decode}


def _short(column: list[str | None]) -> str | list[str | None]:
    """One name if all parameters of a group have the same, which is the usual case."""
    return column[0] if column[0] is not None and len(set(column)) == 1 else column


def _saved(optimizer: Optimizer) -> dict[torch.Tensor, dict[str, str]]:
    """The record of each parameter as the groups have it.

    It is one string per group: checkpoints that store each leaf under its own key would split a mapping, and then
    require the same keys in every template.
    """
    found: dict[torch.Tensor, dict[str, str]] = {}
    for i, group in enumerate(optimizer.param_groups):
        params = group["params"]
        for name, column in _parsed(group, i).items():
            for p, fmt in zip(params, [column] * len(params) if isinstance(column, str) else column, strict=False):
                if fmt is not None:
                    found.setdefault(p, {})[name] = fmt
    return found


def _parsed(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    columns: dict[str, Any] = json.loads(group.get(FORMATS_KEPT, "{}"))
    names = {fmt for column in columns.values() for fmt in ([column] if isinstance(column, str) else column)}
    unknown = sorted(names - FORMATS.keys() - {None})
    if unknown:
        raise ValueError(
            f"param_groups[{index}] has states that were stored as {unknown[0]!r}, a format that is not known here; "
            f"known formats: {', '.join(FORMATS)}. Register it (collage_neuron.FORMATS) before the checkpoint is loaded"
        )
    return columns
