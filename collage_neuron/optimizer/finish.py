"""Writes the numbers that a step changes, after its tensors: of states, groups and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.passes.capture.planes import detached
from collage_neuron.states import steady

if TYPE_CHECKING:
    from collage_neuron.recording import idle, trace
    from collage_neuron.runtime.plan import Job


def finish(optimizer: Optimizer, job: Job, scalars: trace.Scalars | None) -> None:
    """Writes the numbers that a job changes: in the states, the group and the optimizer."""
    seen = steady.of(optimizer)
    states = steady.states_of(optimizer, job.params, seen)
    if scalars is not None or seen is None or not _write_alike(states, job.recording.scalars):
        steady.changed(optimizer)
        for p in job.params:
            _write_scalars(optimizer.state[p], job.recording.scalars if scalars is None else scalars[p])
    if job.recording.captured.clears_gradient:
        for p in job.params:
            p.grad = None
    for p in compress(job.params, map(not_, states)):
        if not optimizer.state[p]:
            del optimizer.state[p]  # as torch's SGD, which has none
    for names, new in (job.group, job.recording.group), (vars(optimizer), job.recording.attributes):
        if scalars is None and new:
            _put_all(names, new)


def finish_idle(optimizer: Optimizer, lacking: idle.Idle, alone: bool) -> None:
    """Writes what a step changes in groups without gradients; `alone` if no group has any, in the optimizer too."""
    for i, recording in lacking.items():
        _put_all(optimizer.param_groups[i], recording.group)
        if alone:
            _put_all(vars(optimizer), recording.attributes)


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
        elif isinstance(value, torch.Tensor):
            state[name] = value.clone()
        elif state.get(name) is not value:  # a list or dictionary is each parameter's own
            _put(state, name, detached(value))


def _put_all(names: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Writes the numbers that a step has changed to attributes or settings."""
    for name, value in new.items():
        _put(names, name, value)


def _put(names: dict[str, Any], name: str, value: Any) -> None:
    """Writes a number that a step has changed; tensors, lists and dictionaries in place, since others may hold them."""
    old = names.get(name)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype == value.dtype:
        old.copy_(value)
    elif type(old) is type(value) is list:
        old[:] = value
    elif type(old) is type(value) is dict:
        old.clear()
        old.update(value)
    else:
        names[name] = value
