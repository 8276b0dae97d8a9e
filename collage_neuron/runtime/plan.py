"""Plans a step: the jobs of every group. Anything that cannot run is rejected here, before anything changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import compress
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import (
    STRATEGIES,
    check_strategy,
    formats_for,
    formats_of_shape,
    has_blocks,
    tells_roles,
)
from collage_neuron.passes.analysis.accumulators import idle_states, slow_states
from collage_neuron.passes.analysis.roles import pattern, roles_of
from collage_neuron.passes.backends.protocol import Backend, check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.recording.bucketing import buckets, learn, naming, record
from collage_neuron.recording.repeated import Repeats
from collage_neuron.runtime.preconditions import check_settings, check_stepped
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.settings import Settings
from collage_neuron.states import exchanged, imprecise, kept_formats, steady
from collage_neuron.states.sharding import is_sharded
from collage_neuron.states.store import is_stored, kept_format


@dataclass(frozen=True)
class Job:
    """Parameters of one group that share one update, and the numbers of this step."""

    group: dict[str, Any]
    params: list[torch.nn.Parameter]
    recording: Recording
    update: Update
    backend: Backend
    settings: Settings
    """Those of the group."""
    imprecise: frozenset[str]
    """States that may need more bits than their formats have (`imprecise`)."""
    watched: frozenset[str]
    """The values that a measured step measures: the parameter, and the states that may stall."""


@dataclass(frozen=True)
class _Rewritten:
    """Results that depend only on an update and the settings of its group, computed once and not in every step."""

    formats: Mapping[str, Format]
    idle: frozenset[str]
    """States that the step does not change."""
    watched: frozenset[str]
    """Values that a monitor measures: the parameter, and slow states that are rounded to nearest."""
    imprecise: frozenset[str]


class _Place(NamedTuple):
    """Where a parameter of a step is, put into words only if a check fails."""

    number: int
    group: int
    p: torch.Tensor

    def __str__(self) -> str:
        shape = list(self.p.shape)
        return f"a parameter (number {self.number} with a gradient, shape {shape}) of param_groups[{self.group}]"


@dataclass(frozen=True)
class _Places:
    """The places of the parameters of a group that have a gradient."""

    group: int
    params: list[torch.nn.Parameter]

    def __iter__(self) -> Iterator[_Place]:
        return (_Place(j, self.group, p) for j, p in enumerate(self.params))


def plan(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: dict[str, Any],
    index: int,
    measured: bool = False,
    repeats: Repeats | None = None,
) -> list[Job]:
    """The jobs for the parameters of a group that have gradients; with `measured`, their updates measure themselves.

    `repeats` has the recordings that need not be made anew.
    """
    check_settings(group, index)
    params = list(compress(group["params"], map(_is_given, map(attrgetter("grad"), group["params"]))))
    places = _Places(index, params)
    check_stepped(params, places, steady.of(optimizer))
    exchanged.check_same(optimizer, params, places)
    jobs = [
        plan_update(base, optimizer, group, part, measured, repeats)
        for bucket in buckets(optimizer, params)
        for part in _parts(group, bucket)
    ]
    if learn(optimizer, [job.recording for job in jobs]):
        return plan(base, optimizer, group, index, measured, repeats)
    return jobs


_is_given = partial(is_not, None)


def _parts(group: dict[str, Any], params: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters that share their formats: in blocks, 0-d ones have others."""
    if all(p.dim() for p in params) or not has_blocks(Settings.of(group).strategy):
        return [params]
    return [part for part in ([p for p in params if p.dim()], [p for p in params if not p.dim()]) if part]


def plan_update(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: dict[str, Any],
    params: list[torch.nn.Parameter],
    measured: bool = False,
    repeats: Repeats | None = None,
) -> Job:
    """Records the update of `params`, which share their host scalars, and rewrites it for the group's strategy."""
    p = params[0]
    settings = Settings.of(group)
    seen = steady.of(optimizer)
    backend = steady.once_a_step(seen, ("backend", settings.backend, p.device), partial(_backend, settings, p.device))
    with naming(base):
        recording = record(base, optimizer, group, p) if repeats is None else repeats.record(group, p)
        if any(map(math.isnan, recording.slots)):
            raise ValueError(
                "a number of the update is NaN (a learning rate, beta or weight decay); nothing was updated"
            )
        if recording.captured.reduces:
            _check_whole(params)
        signs = _signs(seen, recording, settings)
        wanted = _Wanted(recording.captured, settings, _named(settings), backend, measured, signs)
        seen = steady.of(optimizer)  # recording may have changed what it found
        last: _Last | None = None if seen is None else seen.structure.table("jobs").get(id(params))
        if last is not None and last.job.params is params and last.fits(wanted, recording.slots):
            return replace(last.job, group=group, recording=recording)
        job, is_idle = _job(optimizer, group, params, recording, wanted)
        if seen is not None and not is_idle:
            seen.structure.keep(seen.structure.table("jobs"), id(params), _Last(job, wanted))
        return job


def _backend(settings: Settings, device: torch.device) -> Backend:
    backend = choose(settings.backend, device)
    require_sound(backend, device)
    return backend


class _Wanted(NamedTuple):
    """What a job depends on beside the structure of the step; all of it is told apart as the objects that it is."""

    captured: Captured
    settings: Settings
    strategy: object
    """That of the name in the settings; None if these have a mapping."""
    backend: Backend
    measured: bool
    signs: object
    """Of the numbers of the step, where formats depend on them."""


class _Last(NamedTuple):
    """The job of an earlier step, for parameters in a list that the structure keeps (`visible.alike`)."""

    job: Job
    wanted: _Wanted

    def fits(self, wanted: _Wanted, slots: Sequence[float]) -> bool:
        """Returns True if nothing that the job depends on has changed."""
        update = self.job.update
        return all(map(is_, self.wanted, wanted)) and update.far == update.far_in(slots)


def _job(
    optimizer: Optimizer,
    group: dict[str, Any],
    params: list[torch.nn.Parameter],
    recording: Recording,
    wanted: _Wanted,
) -> tuple[Job, bool]:
    """The job; and True if states are left as they are, so that it depends on their formats."""
    captured, settings, _, backend, measured, _ = wanted
    known = _rewritten_for(optimizer, recording, wanted, params[0].dtype)
    formats = formats_of_shape(known.formats, params[0].dim())
    formats = {**formats, **_as_stored(optimizer, params[0], known.idle)} if known.idle else formats
    watched = known.watched if measured else frozenset()
    update = rewrite(captured, formats, settings.arithmetic, watched)
    if far := update.far_in(recording.slots):
        update = rewrite(captured, formats, settings.arithmetic, watched, far)
    check_supported(backend, update)
    return Job(group, params, recording, update, backend, settings, known.imprecise, known.watched), bool(known.idle)


def _check_whole(params: list[torch.nn.Parameter]) -> None:
    """Raises for parameters of which this process has a part: the sum over a part is not that over the parameter."""
    part = next((p for p in params if is_sharded(p) or torch_privates.is_flattened(p)), None)
    if part is not None:
        raise UnsupportedUpdate(
            f"its step adds up all elements of a parameter (a norm, a mean), and of one with shape {list(part.shape)} "
            "this process has a part only (FSDP, DTensor): its sum would be that of the part. Keep the parameters "
            "whole (DDP), or use an optimizer that updates each element by itself"
        )


_known: dict[Any, _Rewritten] = {}
_MOST = 4096
"""How many are known before all are forgotten: numbers may be others in every step."""


def _numbers(recording: Recording) -> object:
    later = recording.following
    return tuple(recording.slots), later and (later.captured.text, tuple(later.slots))


def _named(settings: Settings) -> object:
    """What the name of a strategy means now: the strategy of a name may be gone, or another."""
    return STRATEGIES.get(settings.strategy) if isinstance(settings.strategy, str) else None


def _signs(seen: steady.Seen | None, recording: Recording, settings: Settings) -> object:
    """What the formats depend on of the numbers of a step, and of the one after; the same object for equal patterns."""
    strategy = settings.strategy
    named = isinstance(strategy, str)
    if not (named and steady.once_a_step(seen, ("tells roles", strategy), partial(tells_roles, strategy))):
        return None
    later = recording.following
    return _one_object((pattern(recording.slots), later and (later.captured.text, pattern(later.slots))))


@lru_cache(maxsize=4096)
def _one_object(found: object) -> object:
    return found


def _rewritten_for(optimizer: Optimizer, recording: Recording, wanted: _Wanted, dtype: torch.dtype) -> _Rewritten:
    """`_rewritten` for the numbers of this step, or of an earlier one of this optimizer with the same pattern."""
    seen, captured = steady.of(optimizer), recording.captured
    if seen is None:
        return _rewritten(recording, wanted.settings, dtype)
    table = seen.structure.table("rewritten")
    key = captured.text, tuple(captured.fresh.items()), wanted.signs, wanted.settings, wanted.strategy, dtype
    found: _Rewritten | None = table.get(key)
    return found or seen.structure.keep(table, key, _rewritten(recording, wanted.settings, dtype))


def _rewritten(recording: Recording, settings: Settings, dtype: torch.dtype) -> _Rewritten:
    """What follows from an update and the numbers of a step, whatever other optimizers there were before."""
    captured = recording.captured
    fresh, numbers = tuple(captured.fresh.items()), _numbers(recording) if tells_roles(settings.strategy) else None
    key = captured.text, captured.states, fresh, numbers, settings, _named(settings), dtype, tuple(FORMATS.values())
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        check_strategy(settings.strategy, settings.arithmetic)  # again
        _check_beginnings(recording, settings, dtype)
        slow, idle = slow_states(captured.graph), idle_states(captured.graph).difference(captured.small)
        roles = roles_of(captured, recording.slots, recording.following)
        formats = formats_for(settings.strategy, captured.states, roles, dtype)
        lacking = imprecise.imprecise_states(captured.graph, settings, dtype).difference(
            captured.small
        )  # they are fp32
        # A stochastic store leaves most small decreases out, and follows on average: that is not a stall.
        nearest = frozenset(name for name in slow if name in formats and formats[name].draw is None)
        found = _known[key] = _Rewritten(formats, idle, nearest | {"param"}, lacking)
    return found


def _check_beginnings(recording: Recording, settings: Settings, dtype: torch.dtype) -> None:
    """Raises for a state that begins below 0, if a later step, which sees no beginning, keeps it in unsigned codes."""
    below = {name: fill for name, fill in recording.captured.fresh.items() if fill < 0}
    if not below:
        return
    captured = replace(recording.captured, fresh={})
    later = formats_for(settings.strategy, captured.states, roles_of(captured, recording.slots), dtype)
    for name, fill in below.items():
        if name in later and not later[name].signed:
            raise UnsupportedUpdate(
                f"the state {name!r} begins at {fill:g}, and adds up what cannot be negative: strategy="
                f"{settings.strategy!r} keeps such states as {later[name].name}, which has no sign. Let it begin at 0, "
                "or use a strategy with signs (strategy='split433')"
            )


def formats_of(recording: Recording, settings: Settings, dtype: torch.dtype) -> Mapping[str, Format]:
    """The storage formats of a recorded update under the settings of its group.

    A state that this step does not change is written by other steps or by methods of the optimizer, and may accumulate
    slowly (SophiaG's `hessian`).
    """
    return _rewritten(recording, settings, dtype).formats


def idle_formats(optimizer: Optimizer, p: torch.Tensor, recording: Recording) -> dict[str, Format]:
    """The current formats of states that this step does not change, so that their low words are not dropped."""
    return _as_stored(optimizer, p, idle_states(recording.captured.graph).difference(recording.captured.small))


def _as_stored(optimizer: Optimizer, p: torch.Tensor, idle: frozenset[str]) -> dict[str, Format]:
    state = optimizer.state.get(p, {})
    record = kept_formats.of(optimizer, p)
    kept = {name: kept_format(p, state, name, record) for name in idle if name in state}
    plain = [fmt for fmt in FORMATS.values() if fmt.draw is None]  # a state that is not updated is not rounded
    return {
        name: next((f for f in plain if f.reads_as(fmt)), fmt)
        for name, fmt in kept.items()
        if is_stored(p, state, name, fmt, record)
    }
