"""Keeps low words of parameters when user code clears the optimizer's state to restart it.

`optimizer.state.clear()`, `optimizer.state = defaultdict(dict)` and `del optimizer.state[p]` are common ways to drop
moments. The further words of a parameter are stored there too, although they are part of the weights: they are put back
before they are needed. Only loading a checkpoint, or another strategy, removes them.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch.optim import Optimizer

from collage_neuron.states import steady
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.state_keys import split_params, split_words, words_of


def note(optimizer: Optimizer, p: torch.Tensor) -> None:
    """Remembers the further words of `p` as they are now, or that it has none."""
    words = words_of(optimizer.state.get(p, {}))
    if words:
        bookkeeping(optimizer).words[p] = words
    else:
        bookkeeping(optimizer).words.pop(p, None)


def note_all(ours: Bookkeeping, seen: steady.Seen) -> None:
    """Remembers the further words of all parameters, after a step."""
    owners, places = seen.structure.once("words", lambda: _places_of_words(seen))
    words = [seen.states[i][key] for i, key in places]
    held = ours.words.values()
    if (
        list(map(id, chain.from_iterable(map(dict.values, held)))) == list(map(id, words))
        and list(chain.from_iterable(held)) == [key for _, key in places]
        and list(map(id, ours.words)) == owners
    ):
        return
    ours.words.clear()  # in place: an optimizer made by copy.copy shares them
    for (i, key), word in zip(places, words, strict=True):
        ours.words.setdefault(seen.owners[i], {})[key] = word


def _places_of_words(seen: steady.Seen) -> tuple[list[int], list[tuple[int, str]]]:
    """The ids of the parameters with further words; for each word the place of its owner and its key."""
    places = [(i, key) for i, state in enumerate(seen.states) for key in words_of(state)]
    return list(dict.fromkeys(id(seen.owners[i]) for i, _ in places)), places


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
    return seen.structure.once("split", lambda: list(map(id, split_words(seen.optimizer.state))))
