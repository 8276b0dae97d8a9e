"""What a step is about to do: every group planned, and what cannot run refused, before anything changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import formats_for
from collage_neuron.passes.analysis.accumulators import idle_states, slow_states
from collage_neuron.passes.backends.protocol import Backend, check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.recording.bucketing import buckets, learn, naming, record
from collage_neuron.runtime.preconditions import check_gradient, check_learning_rate, check_param
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.settings import Settings
from collage_neuron.states import exchanged
from collage_neuron.states.store import is_stored


@dataclass(frozen=True)
class Job:
    """Parameters of one group that share one update, and the numbers of this step."""

    group: dict[str, Any]
    params: list[torch.nn.Parameter]
    recording: Recording
    update: Update
    backend: Backend


def plan(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], index: int, measured: bool = False
) -> list[Job]:
    """What there is to do for the parameters of a group that have gradients; updates that measure themselves if so."""
    check_learning_rate(group, index)
    params = [p for p in group["params"] if p.grad is not None]
    for j, p in enumerate(params):
        where = f"a parameter (number {j} with a gradient, shape {list(p.shape)}) of param_groups[{index}]"
        check_param(p, where)
        check_gradient(p, where)
        exchanged.check_same(optimizer, p, where)
    jobs = [plan_update(base, optimizer, group, bucket, measured) for bucket in buckets(optimizer, params)]
    if learn(optimizer, [job.recording for job in jobs]):
        return plan(base, optimizer, group, index, measured)
    return jobs


def plan_update(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: dict[str, Any],
    params: list[torch.nn.Parameter],
    measured: bool = False,
) -> Job:
    """Records the update of `params`, which share their host scalars, and rewrites it for the group's strategy."""
    p = params[0]
    settings = Settings.of(group)
    backend = choose(settings.backend, p.device)
    require_sound(backend, p.device)
    with naming(base):
        recording = record(base, optimizer, group, p)
        if any(map(math.isnan, recording.slots)):
            raise ValueError(
                "a number of the update is NaN (a learning rate, beta or weight decay); nothing was updated"
            )
        formats = formats_of(recording, settings, p.dtype) | idle_formats(optimizer, p, recording)
        watched = {"param", *slow_states(recording.captured.graph)} if measured else ()
        update = rewrite(recording.captured, formats, settings.arithmetic, frozenset(watched))
        check_supported(backend, update)
        return Job(group, params, recording, update, backend)


def formats_of(recording: Recording, settings: Settings, dtype: torch.dtype) -> dict[str, Format]:
    """The storage formats of a recorded update under the settings of its group.

    A state that this step leaves alone is written elsewhere, by other steps or by methods of the optimizer: it may
    accumulate as slowly as any (SophiaG's `hessian`).
    """
    captured = recording.captured
    slow = slow_states(captured.graph) | idle_states(captured.graph)
    return formats_for(settings.strategy, captured.states, slow, dtype)


def idle_formats(optimizer: Optimizer, p: torch.Tensor, recording: Recording) -> dict[str, Format]:
    """A state that this step leaves alone, and another step does not, stays as it is: its low word is not dropped."""
    state = optimizer.state.get(p, {})
    names = [name for name in idle_states(recording.captured.graph) if name in state]
    plain = [fmt for fmt in FORMATS.values() if fmt.draw is None]  # what stays as it is needs no chance
    return {name: fmt for name in names for fmt in plain if is_stored(p, state, name, fmt)}
