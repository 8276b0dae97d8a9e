"""Keeps low words of parameters when user code clears the optimizer's state to restart it.

`optimizer.state.clear()`, `optimizer.state = defaultdict(dict)` and `del optimizer.state[p]` are common ways to drop
moments. The further words of a parameter are stored there too, although they are part of the weights: they are put back
before they are needed. Only loading a checkpoint, or another strategy, removes them.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from collage_neuron.states import steady
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.names import split_params, split_words, words_of


def note(optimizer: Optimizer, p: torch.Tensor) -> None:
    """Remembers the further words of `p` as they are now, or that it has none."""
    words = words_of(optimizer.state.get(p, {}))
    if words:
        bookkeeping(optimizer).words[p] = words
    else:
        bookkeeping(optimizer).words.pop(p, None)


def restore(optimizer: Optimizer) -> None:
    """Gives parameters back the words that were cleared away with their states."""
    words, seen = bookkeeping(optimizer).words, steady.of(optimizer)
    if seen is not None and _ids_of_split(seen) == list(map(id, words)):
        return
    split = split_params(optimizer.state)
    if words.keys() <= split:
        return
    steady.changed(optimizer)
    held = {p for group in optimizer.param_groups for p in group["params"]}
    for p in words.keys() & held - split:
        optimizer.state.setdefault(p, {}).update(words[p])


def _ids_of_split(seen: steady.Seen) -> list[int]:
    """The ids of the parameters with words, which depend on the structure alone."""
    known = seen.structure.known
    if "split" not in known:
        known["split"] = list(map(id, split_words(seen.optimizer.state)))
    ids: list[int] = known["split"]
    return ids
