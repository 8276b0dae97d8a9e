"""What every load of a checkpoint ends with: the settings of groups, and what was known of the last state."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.settings import KEYS, Settings
from collage_neuron.states import external_writes
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.state_keys import split_params


def refused(why: str) -> ValueError:
    """The error of a checkpoint that is not loaded."""
    return ValueError(f"the checkpoint was not loaded, and nothing was changed: {why}")


def settle_settings(optimizer: Optimizer, before: list[dict[str, Any]]) -> list[bool]:
    """Restores settings: from a checkpoint of ours, else the group's own. Returns which groups are of plain torch."""
    plain = ["collage_strategy" not in group for group in optimizer.param_groups]
    for i, (group, old) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        for key in KEYS:
            if key in old:
                group.setdefault(key, old[key])
        try:
            loaded, own = Settings.of(group), Settings.of(old)
        except ValueError as error:
            raise refused(f"param_groups[{i}]: {error}") from error
        tell_of_settings(i, own, loaded)
    return plain


def tell_of_settings(index: int, own: Settings, loaded: Settings) -> None:
    """Warns if a checkpoint brought another strategy or arithmetic than the optimizer was, or is, compiled for."""
    if (loaded.strategy, loaded.arithmetic) != (own.strategy, own.arithmetic):
        warnings.warn(
            f"param_groups[{index}] was compiled for strategy {own.strategy!r}, arithmetic {own.arithmetic!r} and goes "
            f"on with those of the checkpoint, {loaded.strategy!r} and {loaded.arithmetic!r}, as torch does with "
            f"every setting of a group. To switch: collage_neuron.compile(optimizer, strategy={own.strategy!r}, "
            f"arithmetic={own.arithmetic!r}) after loading",
            stacklevel=5,
        )


def begin_anew(optimizer: Optimizer, kept: set[torch.Tensor]) -> None:
    """Forgets what was known of the last state; low words of all but `kept` belong to what the parameters will hold."""
    ours = bookkeeping(optimizer)
    ours.interrupted = ""
    ours.words.clear()
    ours.marks.states.clear()
    ours.groups.clear()  # of another strategy it was told
    for p in split_params(optimizer.state):
        if p in kept:  # as before, the next step looks at what was written since they were stored
            external_writes.note_words(optimizer, p)
        else:
            external_writes.remember(optimizer, p, external_writes.LOADED)
