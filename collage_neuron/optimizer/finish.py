"""Writes the numbers that a recorded step changes in states, after its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.states import steady

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job


def finish(optimizer: Optimizer, job: Job) -> None:
    """Writes the numbers that a job changes in the states."""
    seen = steady.of(optimizer)
    states = steady.states_of(optimizer, job.params, seen)
    if seen is None or not _write_alike(states, job.recording.scalars):
        steady.changed(optimizer)
        for p in job.params:
            _write_scalars(optimizer.state[p], job.recording.scalars)
    if job.recording.captured.clears_gradient:
        for p in job.params:
            p.grad = None
    for p in compress(job.params, map(not_, states)):
        if not optimizer.state[p]:
            del optimizer.state[p]  # as torch's SGD, which has none


def _write_alike(states: list[dict[str, Any]], scalars: Mapping[str, Any]) -> bool:
    """Writes the host scalars of parameters that share a recording, all of a name at once.

    Returns False, and writes nothing, if that would change keys or types. It looks at one state only: parameters share
    a recording in a steady step only if the names and types of their numbers agree (`visible.told_in`).
    """
    first = states[0]
    if not all(name in first and type(first[name]) is type(value) for name, value in scalars.items()):
        return False
    for name, value in scalars.items():
        if isinstance(value, torch.Tensor):
            torch_privates.copy_to_all([state[name] for state in states], value)
        else:
            for state in states:
                state[name] = value
    return True


def _write_scalars(state: dict[str, Any], scalars: Mapping[str, Any]) -> None:
    """Writes the host scalars after a step; existing 0-d tensors in place, since a checkpoint may refer to them."""
    if not scalars.keys() <= state.keys():  # new ones come first, as `step` does in torch's states
        tensors = dict(state)
        state.clear()
        state.update(dict.fromkeys(scalars) | tensors)
    for name, value in scalars.items():
        if isinstance(value, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
