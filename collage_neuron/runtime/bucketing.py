"""Sorts the parameters of a group by what their next step depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states import kept_formats, steady
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.visible import alike, told, told_in


def buckets(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> list[list[Any]]:
    """Parameters that share an update: those with equal host scalars (step counts), states, class, dtype, device."""
    found: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
    seen = steady.of(optimizer)
    try:
        if seen is not None and (same := alike(seen, params)) is not None:
            return same
        known = bookkeeping(optimizer).small
        told_of_each = told(optimizer.state, params, known) if seen is None else told_in(seen, params)
    except UnsupportedUpdate:
        kept_formats.require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise
    for p, key in zip(params, told_of_each, strict=True):
        kind = (type(p), p.dtype, p.device) if seen is None else ()  # `told_in` has these
        found[(*kind, key)].append(p)
    return list(found.values())


@contextmanager
def naming(base: type[Optimizer]) -> Iterator[None]:
    """A context that puts the optimizer's name in front of an UnsupportedUpdate without it."""
    try:
        yield
    except UnsupportedUpdate as error:
        if base.__name__ in str(error):
            raise
        raise type(error)(f"{base.__name__} cannot be compiled: {error}") from error
