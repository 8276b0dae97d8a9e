"""Rejects a step count that several parameters share: torch's optimizers would advance it once for each of them."""

from __future__ import annotations

from itertools import chain, compress

import torch
from torch.optim import Optimizer

from collage_neuron.states.steady import Seen


def check_counts(optimizer: Optimizer, seen: Seen | None) -> None:
    """Raises ValueError if two states of an optimizer of torch hold one 0-d tensor: each step would count twice."""
    if seen is None:
        return
    values = list(chain.from_iterable(map(dict.values, seen.states)))
    places = seen.structure.once("counts", lambda: tuple(isinstance(x, torch.Tensor) and not x.dim() for x in values))
    counts = list(map(id, compress(values, places)))
    if len(counts) == len(set(counts)):
        return
    name = next(k for state in seen.states for k, x in state.items() if id(x) in counts and counts.count(id(x)) > 1)
    raise ValueError(
        f"two states hold one tensor as {name!r}, and {type(optimizer).__name__} would advance it once for each of "
        f"them in every step; nothing was updated: give each state its own (state[{name!r}] = state[{name!r}].clone())"
    )
