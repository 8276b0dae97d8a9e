"""Plans a step: the jobs of every group. Anything that cannot run is rejected here, before anything changes.

Most steps find what the last one found. A plan depends on parameters and states (`step_inventory.Structure`, which
holds it), on which parameters have gradients and of what kind these are, and on settings, strategies and backends. All
of that is compared in a few calls, whatever the number of parameters; what is left are numbers (`again`). If anything
else has changed, the step is planned as the first one is (`plan`), with all checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, compress
from operator import attrgetter, is_, is_not, itemgetter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate, naming
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import (
    STRATEGIES,
    formats_of_shape,
    has_blocks,
)
from collage_neuron.passes.backends.protocol import Backend, check_supported
from collage_neuron.passes.backends.registry import REGISTERED, choose
from collage_neuron.passes.ir.scalars import ScalarProgram, read_numbers
from collage_neuron.passes.ir.update import NEAR, Captured, Recording, Update
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime.preconditions import LARGEST, check_settings, check_stepped
from collage_neuron.runtime.rounding_probe import require_sound
from collage_neuron.runtime.update_formats import Rewritten, as_stored, formats_of, named, rewritten_for, signs_of
from collage_neuron.settings import KEYS, GroupNumbers, Settings
from collage_neuron.states import param_checks, step_inventory
from collage_neuron.states.bookkeeping import Bookkeeping
from collage_neuron.states.sharding import is_split
from collage_neuron.states.step_inventory import Gradients, Seen, are_same
from collage_neuron.states.visible_states import buckets, kind_in


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
    """`Launch.kept`, of a job of an earlier step with tensors that are like those of now (`again`)."""

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


# --- the plan of an earlier step with the numbers of this one ---------------------------------------------------------


class _Part(NamedTuple):
    """A job, and what has to be so that it is one in a later step."""

    job: Job
    group: int
    """The place of its group."""
    counts: tuple[str, ...]
    """The names of the numbers in its states, which all parameters of the job share."""
    decisive: ScalarProgram
    """The numbers on which the form of its update depends (`Update.decisive`)."""
    far: list[bool]
    """Of each of them, True if the update has the form for one that is not near 1."""
    signs: object
    """Of the numbers, what formats depend on (`update_formats.signs_of`)."""
    rewritten: Rewritten
    """What follows from these. The numbers of many groups seldom stay as they are, and formats seldom change."""

    def again(self, group: dict[str, Any], numbers: Sequence[Any], seen: Seen) -> Job | None:
        """The job with the numbers of its group in this step; None if they are such that it is another one."""
        states = seen.state_of(self.job.params)
        columns = [[*map(itemgetter(name), states)] for name in self.counts]
        if any(len(column) > 1 and len({*read_numbers(column)}) > 1 for column in columns):
            return None
        recording: Recording | None = self.job.recording.followed.again([*numbers, *(x[0] for x in columns)])
        if recording is None or not all(map(LARGEST.__ge__, map(abs, recording.slots))):  # nor NaN
            return None
        if [abs(x) < NEAR for x in self.decisive.run(recording.slots)] != self.far:
            return None
        signs = self.signs and signs_of(seen, recording, self.job.settings)
        if signs is not self.signs and _rewritten(seen, self.job, recording, signs) != self.rewritten:
            return None
        return self.job.again(group, recording)


@dataclass
class _Plan:
    """The jobs of a step, and all that they depend on but for the structure of the step."""

    parts: list[_Part]
    names: Sequence[str]
    """The settings that the class reads."""
    settings: list[Any]
    """What settings of each group are not numbers."""
    guard: Callable[..., bool]
    """Of the gradients."""
    meanings: list[Any]
    narrow: object
    """The set of the parameters that are in bf16 (`param_checks`)."""
    may_skip: bool
    """True if a group skips steps whose gradients are not finite."""
    last: list[Any] = field(default_factory=list)
    """The groups' settings, the objects, in the last step that had this plan; nothing if one is a list, which may
    have other elements now."""
    numbers: list[list[Any]] = field(default_factory=list)
    """The numbers among them."""

    def read(self, groups: Sequence[dict[str, Any]]) -> tuple[bool, list[list[Any]] | None]:
        """True if a setting may have changed; and the numbers of each group, None if other settings have changed."""
        now = list(chain.from_iterable((type(group), *group, *group.values()) for group in groups))
        if are_same(now, self.last):
            return False, self.numbers
        settings = [GroupNumbers(group, self.names) for group in groups]
        if list(map(_told, groups, settings)) != self.settings:
            return True, None
        are_lists = any(type(group.get(name)) is list for group in groups for name in self.names)
        self.last, self.numbers = [] if are_lists else now, [each.numbers for each in settings]
        return True, self.numbers


class Planned(NamedTuple):
    """The next step, as an earlier one was planned."""

    jobs: list[Job]
    may_skip: bool
    """True if a group skips steps whose gradients are not finite."""
    has_other_settings: bool
    """True if a setting may be another one than in the last step that was planned so."""


def again(book: Bookkeeping, groups: Sequence[dict[str, Any]], gradients: Gradients) -> Planned | None:
    """The next step, if its jobs are those of an earlier one with other numbers; None if that is not known."""
    seen: Seen | None = book.seen
    if seen is None:
        return None
    have, grads = gradients
    known: _Plan | None = seen.structure.table("plans").get(have)
    if known is None or known.narrow is not book.narrow or known.meanings != _meanings():
        return None
    has_changed, numbers = known.read(groups)
    if numbers is None or grads is None or not known.guard(*grads):
        return None
    jobs: list[Job] = []
    for part in known.parts:
        job = part.again(groups[part.group], numbers[part.group], seen)
        if job is None:
            return None
        jobs.append(job)
    return Planned(jobs, known.may_skip, has_changed)


def note(book: Bookkeeping, groups: Sequence[dict[str, Any]], names: Sequence[str], jobs: Sequence[Job]) -> None:
    """Called after a step that was planned: its plan is that of later steps that are like it, if they may be.

    `names` are the settings that the class reads.
    """
    seen: Seen | None = book.seen
    settings = [GroupNumbers(group, names) for group in groups]
    told = list(map(_told, groups, settings))
    if seen is None or None in told or not all(map(_may_be_again, jobs)):
        return
    have, grads = seen.gradients()
    if grads is None or sum(len(job.params) for job in jobs) != sum(have):
        return
    parts = [_part(seen, groups, job) for job in jobs]
    may_skip = any(Settings.of(group).nonfinite == "skip" for group in groups)
    made = _Plan(parts, names, told, torch_privates.guard(grads), _meanings(), book.narrow, may_skip)
    seen.structure.keep(seen.structure.table("plans"), have, made)


def _meanings() -> list[Any]:
    """What names in settings mean: the strategies, and the backends that other code has registered."""
    return [*STRATEGIES.items(), *REGISTERED.values()]


def _told(group: Mapping[str, Any], settings: GroupNumbers) -> Any:
    """What equals that of another step if settings differ in numbers only; None if they may be read in other ways."""
    is_plain = type(group) is dict and settings.key is not None and isinstance(group.get(KEYS[0], ""), str)
    return (settings.key, *map(group.get, KEYS)) if is_plain else None


def _may_be_again(job: Job) -> bool:
    """Returns True for a job of which nothing but numbers can change while its tensors are alike."""
    captured = job.recording.captured
    changes_others = captured.clears_gradient or captured.small or "grad" in job.update.outputs
    if not job.update.far.issubset(job.update.decisive):
        return False
    return job.recording.followed is not None and captured.seen_as is None and not changes_others


def _part(seen: Seen, groups: Sequence[Any], job: Job) -> _Part:
    p, group = job.params[0], next(i for i, group in enumerate(groups) if group is job.group)
    counts = kind_in(seen, p, *seen.state_of([p])).tensors
    signs = signs_of(seen, job.recording, job.settings)
    decisive, far = job.update.decisive, [x in job.update.far for x in job.update.decisive]
    rewritten, program = _rewritten(seen, job, job.recording, signs), ScalarProgram([("fp32", x) for x in decisive])
    return _Part(replace(job, kept={}), group, counts, program, far, signs, rewritten)


def _rewritten(seen: Seen, job: Job, recording: Recording, signs: object) -> Rewritten:
    return rewritten_for(seen.optimizer, recording, job.settings, signs, job.params[0].dtype)
