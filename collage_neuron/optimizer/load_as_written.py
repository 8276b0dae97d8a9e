"""Loads the states of an optimizer whose steps run as written: whatever the optimizer made, as it was saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager import limits
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.runtime.fallback_warning import note
from collage_neuron.settings import Settings
from collage_neuron.states import reduced_states
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.format_record import drop_placeholders

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Records
    from collage_neuron.trace.dry_run import Known


def runs_as_written(
    base: type[Optimizer], optimizer: Optimizer, saved: Mapping[str, Any], known: Known | None, records: Records
) -> bool:
    """Returns True if steps run as written, or will with the settings that a checkpoint brings.

    Before its first step, an optimizer may not have said so. Then the names of its states in other shapes than their
    parameter are not known either, and are learned here: `known` is what is of the next step, where it is traced, and
    `records` has its updates.
    """
    ours, own = bookkeeping(optimizer), [Settings.of(group) for group in optimizer.param_groups]
    try:
        settings = [Settings.of({**mine, **of_run}) for mine, of_run in _pairs(optimizer, saved)]
    except ValueError:  # which is said of the group when it is loaded
        settings = own
    alike = list(map(_deciding, own)) == list(map(_deciding, settings))
    if alike and (ours.as_written or (ours.steps and known is None)):
        return bool(ours.as_written)
    ours.as_written = ""
    for _, recording in () if known is None else known.of_groups(optimizer):
        reduced_states.learn(ours, recording.captured)
    try:
        for group in optimizer.param_groups:
            if group["params"]:
                records(group, group["params"][0])
    except UnsupportedUpdate as refusal:
        with suppress(UnsupportedUpdate):
            limits.check(base, optimizer, refusal, settings)
            # One that has modes may have raised an error of its own because it is in evaluation mode.
            if refusal.__cause__ is None or not hasattr(optimizer, "train"):
                note(base, optimizer, refusal)
    return bool(ours.as_written)


def _pairs(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """The groups of an optimizer and those of a checkpoint that has as many."""
    return zip(optimizer.param_groups, saved["param_groups"], strict=True)


def _deciding(settings: Settings) -> tuple[object, ...]:
    """The settings that decide whether steps run as written."""
    return settings.strategy, settings.arithmetic, settings.backend


def put_back(optimizer: Optimizer, saved: Mapping[str, Any], plain: Sequence[bool]) -> None:
    """Restores the states in their own types: torch casts all floating tensors to the type of the parameter.

    In groups that are of `plain` torch a state in bf16 is so because its parameter was, and is one in fp32 now.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    params = dict(zip(ids, (p for group in optimizer.param_groups for p in group["params"]), strict=True))
    for index, state in saved["state"].items():
        p = params.get(index)
        if p is None:
            optimizer.state[index] = copy.deepcopy(state)
        else:
            optimizer.state[p].update({k: _own(v, p) for k, v in state.items()})
    for group in compress(optimizer.param_groups, plain):
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            state.update({k: x.float() for k, x in state.items() if _is_narrow(x, p)})
    drop_placeholders([optimizer.state[p] for p in params.values() if p in optimizer.state])


def _is_narrow(x: Any, p: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 and x.shape != p.shape


def _own(x: Any, p: torch.Tensor) -> Any:
    """A copy of what a checkpoint has; tensors that are no numbers are on the device of the parameter."""
    if isinstance(x, torch.Tensor):
        return x.detach().to(p.device if x.dim() else x.device, copy=True)
    if type(x) is dict:
        return {k: _own(v, p) for k, v in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_own(y, p) for y in x)
    return copy.deepcopy(x)
