"""Records an optimizer's next step, once for all parameters of a group that are alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording.following import with_following
from collage_neuron.recording.visible import alike, attribute, told, told_in, visible
from collage_neuron.states import kept_formats, small, steady, zero_dim
from collage_neuron.states.bookkeeping import bookkeeping


def recordings(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter]
) -> list[tuple[list[torch.nn.Parameter], Recording]]:
    """The recordings of the next step for `params` of `group`, each with the parameters that share it."""
    found = [(bucket, record(base, optimizer, group, bucket[0])) for bucket in buckets(optimizer, params)]
    again = learn(optimizer, [recording for _, recording in found])
    return recordings(base, optimizer, group, params) if again else found


def learn(optimizer: Optimizer, found: Iterable[Recording]) -> bool:
    """Remembers which attributes of parameters the step reads; returns True if one was not known before.

    Parameters with different values of such an attribute get separate recordings.
    """
    asked = bookkeeping(optimizer).asked
    known = len(asked)
    asked.update(name for recording in found for name in recording.asked)
    return len(asked) > known


def buckets(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> list[list[Any]]:
    """Parameters that share a recording: those with equal host scalars (step counts), states, class, dtype, device."""
    found: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
    asked, seen = sorted(bookkeeping(optimizer).asked), steady.of(optimizer)
    try:
        if seen is not None and (same := alike(seen, params, asked)) is not None:
            return same
        known = bookkeeping(optimizer).small
        told_of_each = told(optimizer.state, params, known) if seen is None else told_in(seen, params)
    except UnsupportedUpdate:
        kept_formats.require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise
    for p, key in zip(params, told_of_each, strict=True):
        attributes = tuple(attribute(p, name) for name in asked)
        kind = (type(p), p.dtype, p.device) if seen is None else ()  # `told_in` has these
        found[(*kind, attributes, key)].append(p)
    return list(found.values())


@contextmanager
def naming(base: type[Optimizer]) -> Iterator[None]:
    """A context that puts the optimizer's name in front of an UnsupportedUpdate without it."""
    try:
        yield
    except UnsupportedUpdate as error:
        if base.__name__ in str(error):
            raise
        raise UnsupportedUpdate(f"{base.__name__} cannot be compiled: {error}") from error


def record(base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], p: torch.nn.Parameter) -> Recording:
    """The recording of the next step of `optimizer` for `p`."""
    try:
        return shown_and_recorded(base, optimizer, group, p)[1]
    except UnsupportedUpdate:
        kept_formats.require_known(optimizer)  # as above
        raise


def shown_and_recorded(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], p: torch.nn.Parameter
) -> tuple[dict[str, Any], Recording]:
    """The state of `p` in the form that a recording needs, and the recording."""
    state = optimizer.state.get(p, {})
    small.check_whole(state, p)
    take, ours = partial(capture, base, optimizer, group, p), bookkeeping(optimizer)
    if p.dim() == 0 and state:
        shown, recording = zero_dim.decide(partial(take, made=ours.makes_small), p, state)
        return shown, with_following(partial(take, made=ours.makes_small), p, shown, recording)
    found = small.decide(take, p, visible(state, p, ours.small), ours.makes_small)
    small.learn(ours, found.recording.captured)
    ours.makes_small = found.makes
    return found.shown, with_following(partial(take, made=found.makes), p, found.shown, found.recording)
