"""Plans a step: the jobs of every group. Anything that cannot run is rejected here, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, naming
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import (
    formats_of_shape,
    has_blocks,
)
from collage_neuron.passes.backends.protocol import Backend, check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir.update import Captured, Recording, Update
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime.preconditions import check_settings, check_stepped
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.runtime.update_formats import as_stored, formats_of, named, rewritten_for, signs_of
from collage_neuron.settings import Settings
from collage_neuron.states import param_checks, step_inventory
from collage_neuron.states.sharding import is_split
from collage_neuron.states.visible_states import buckets


@dataclass(frozen=True)
class Job:
    """Parameters of one group that share one update, and the numbers of this step."""

    group: dict[str, Any]
    params: list[torch.nn.Parameter]
    recording: Recording
    update: Update
    backend: Backend
    settings: Settings
    """The settings of the group."""
    imprecise: frozenset[str]
    """States that may need more bits than their formats have (`strategy_checks`)."""
    watched: frozenset[str]
    """The values that a measured step measures: the parameter, and the states that may stall."""
    kept: dict[Any, Any] | None = None
    """`Launch.kept`, of a job of an earlier step with tensors that are like those of now (`steady_plan`)."""

    def of(self, places: Sequence[int]) -> Job:
        """The job of some of its parameters, by their places among them."""
        return replace(self, params=[self.params[i] for i in places], recording=self.recording.of(places), kept=None)

    def again(self, group: dict[str, Any], recording: Recording) -> Job:
        """The job with the numbers of another step."""
        fixed = self.update, self.backend, self.settings, self.imprecise, self.watched, self.kept
        return Job(group, self.params, recording, *fixed)

    def of_param(self, p: torch.Tensor) -> Job:
        """The job of one of its parameters."""
        return self.of([next(i for i, q in enumerate(self.params) if q is p)])

    def formats_under(self, settings: Settings) -> Mapping[str, Format]:
        """The storage formats that its update has under other settings, of bf16 parameters."""
        return formats_of(self.recording, settings, torch.bfloat16)

    def apart(self) -> list[Job]:
        """The jobs of parameters that share all numbers."""
        return [self.of([i]) for i in range(len(self.params))] if self.recording.rows else [self]

    @property
    def by_factors(self) -> list[list[int]]:
        """The places of parameters whose numbers need the same update (`Update.far`): mostly all."""
        found: dict[object, list[int]] = {}
        for i, slots in enumerate(self.recording.rows or [self.recording.slots]):
            found.setdefault(self.update.far_in(slots), []).append(i)
        return list(found.values())


Records = Callable[[dict[str, Any], torch.nn.Parameter], Recording]
"""What has, or makes, the recording of the next step of a parameter of a group."""


def plan(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: dict[str, Any],
    index: int,
    records: Records,
    measured: bool = False,
) -> list[Job]:
    """The jobs for the parameters of a group that have gradients; with `measured`, their updates measure themselves.

    `records` has, or makes, the recordings of the next step.
    """
    check_settings(group, index)
    params = list(compress(group["params"], map(partial(is_not, None), map(attrgetter("grad"), group["params"]))))
    check_stepped(params, _places(index, params), step_inventory.of(optimizer))
    param_checks.check_same(optimizer, params, _places(index, params))
    return [
        plan_update(base, optimizer, group, part, records, measured)
        for bucket in buckets(optimizer, params)
        for part in _parts(group, bucket)
    ]


def _places(group: int, params: Sequence[torch.Tensor]) -> Iterator[str]:
    """Where parameters are, put into words only if a check asks."""
    return (
        f"a parameter (number {i} with a gradient, shape {list(p.shape)}) of param_groups[{group}]"
        for i, p in enumerate(params)
    )


def _parts(group: dict[str, Any], params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that share their formats."""
    # In blocks, 0-d ones have others (`formats_of_shape`).
    if all(map(torch.Tensor.dim, params)) or not has_blocks(Settings.of(group).strategy):
        return [params]
    return [part for part in ([p for p in params if p.dim()], [p for p in params if not p.dim()]) if part]


def plan_update(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: dict[str, Any],
    params: list[torch.nn.Parameter],
    records: Records,
    measured: bool = False,
) -> Job:
    """Records the update of `params`, which share their host scalars, and rewrites it for the group's strategy."""
    # It may not be sound: this is said before anything is recorded.
    _backend_of(Settings.of(group), params[0], step_inventory.of(optimizer))
    with naming(base):
        recording = records(group, params[0])
        if any(map(math.isnan, recording.slots)):  # those of a traced step may be values, of gradients that are NaN
            raise ValueError(
                "a number of the update is NaN (a learning rate, beta or weight decay); nothing was updated"
            )
        return job_of(optimizer, group, params, recording, measured)


def job_of(
    optimizer: Optimizer,
    group: dict[str, Any],
    params: list[torch.nn.Parameter],
    recording: Recording,
    measured: bool = False,
) -> Job:
    """The job of a recording: the update of `params`, rewritten for the group's strategy."""
    if recording.captured.seen_as is not None:
        _check_as_seen(params, recording.captured)
    settings, seen = Settings.of(group), step_inventory.of(optimizer)
    backend, signs = _backend_of(settings, params[0], seen), signs_of(seen, recording, settings)
    wanted = _Wanted(recording.captured, settings, named(settings), backend, measured, signs)
    last: _Last | None = None if seen is None else seen.structure.table("jobs").get(id(params))
    if last is not None and last.job.params is params and last.fits(wanted, recording.slots):
        return last.job.again(group, recording)
    job, is_idle = _job(optimizer, group, params, recording, wanted)
    if seen is not None and not is_idle:
        seen.structure.keep(seen.structure.table("jobs"), id(params), _Last(job, wanted))
    return job


def _backend_of(settings: Settings, p: torch.Tensor, seen: step_inventory.Seen | None) -> Backend:
    """The backend of a group, chosen once a step; it is probed once for a structure."""
    key = settings, p.device
    known: Backend | None = None if seen is None else seen.backends.get(key)
    if known is not None:
        return known
    backend = choose(settings.backend, p.device)
    probe = partial(require_sound, backend, p.device, settings.strategy)
    if seen is None:
        probe()
    else:
        seen.structure.once(("sound", backend, p.device, named(settings), repr(settings.strategy)), probe)
        seen.backends[key] = backend
    return backend


class _Wanted(NamedTuple):
    """What a job depends on beside the structure of the step; all of it is told apart as the objects that it is."""

    captured: Captured
    settings: Settings
    strategy: object
    """The strategy of the name in the settings; None if these have a mapping."""
    backend: Backend
    measured: bool
    signs: object
    """The pattern of the numbers of the step, where formats depend on it (`update_formats.signs_of`)."""


class _Last(NamedTuple):
    """The job of an earlier step."""

    # Known by the id of its list of parameters, which the structure keeps alive (`visible_states.buckets`).

    job: Job
    wanted: _Wanted

    def fits(self, wanted: _Wanted, slots: Sequence[float]) -> bool:
        """Returns True if nothing that the job depends on has changed."""
        update = self.job.update  # settings and captured updates are cached, so that equal ones are one object
        return all(map(is_, self.wanted, wanted)) and update.far == update.far_in(slots)


def _job(
    optimizer: Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter], recording: Recording, wanted: _Wanted
) -> tuple[Job, bool]:
    """The job; and True if states are left as they are, so that it depends on their formats."""
    captured, settings, _, backend, measured, _ = wanted
    known = rewritten_for(optimizer, recording, settings, wanted.signs, params[0].dtype)
    formats = formats_of_shape(known.formats, params[0].dim())
    formats = {**formats, **as_stored(optimizer, params[0], known.idle)} if known.idle else formats
    watched = known.watched if measured else frozenset()
    update = rewrite(captured, formats, settings.arithmetic, watched)
    if far := update.far_in(recording.slots):
        update = rewrite(captured, formats, settings.arithmetic, watched, far)
    check_supported(backend, update, params[0].device)
    return Job(group, params, recording, update, backend, settings, known.imprecise, known.watched), bool(known.idle)


def _check_as_seen(params: list[torch.nn.Parameter], captured: Captured) -> None:
    """Raises for parameters whose elements do not lie one after another, and which a step sees in another shape."""
    for p in params:
        seen = f"its step sees a parameter of shape {list(p.shape)} in the shape {list(captured.seen_as or ())}, and "
        if not p.is_contiguous():
            raise UnsupportedUpdate(
                f"{seen}its elements do not lie in memory one after the other; make it contiguous before compile "
                "(p.data = p.data.contiguous())"
            )
        if is_split(p):
            raise UnsupportedUpdate(
                f"{seen}mark_sharding (SPMD) has split it over devices, which says nothing of how states of that shape "
                "are split; leave it whole, or use an optimizer that sees parameters as they are"
            )
