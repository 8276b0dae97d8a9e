"""The plan of an earlier step with the numbers of this one: most steps find what the last one found.

A plan depends on parameters and states (`step_inventory.Structure`, which holds it), on which parameters have gradients
and of what kind these are, and on settings, strategies and backends. All of that is compared here, in a few calls
whatever the number of parameters; what is left are numbers. If anything else has changed, `again` returns None, and the
step is planned as the first one is (`step_plan.plan`), with all checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress, repeat
from operator import is_not
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.registry import REGISTERED
from collage_neuron.passes.ir.update import Recording
from collage_neuron.runtime.preconditions import LARGEST
from collage_neuron.runtime.update_formats import signs_of
from collage_neuron.settings import KEYS, Settings
from collage_neuron.states.bookkeeping import Bookkeeping
from collage_neuron.states.sharding import are_sharded_alike, locals_of
from collage_neuron.states.step_inventory import Seen, are_same
from collage_neuron.states.visible_states import are_equal, kind_in
from collage_neuron.trace.scalar_program import GroupNumbers

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job


class _Part(NamedTuple):
    """A job, and what has to be so that it is one in a later step."""

    job: Job
    group: int
    """The place of its group."""
    counts: tuple[str, ...]
    """The names of the numbers in its states, which all parameters of the job share."""
    signs: object
    """Of the numbers, what formats depend on (`update_formats.signs_of`)."""

    def again(self, group: dict[str, Any], numbers: Sequence[Any], seen: Seen) -> Job | None:
        """The job with the numbers of its group in this step; None if they are such that it is another one."""
        states = seen.state_of(self.job.params)
        columns = [[state[name] for state in states] for name in self.counts]
        if not all(map(are_equal, columns)):
            return None
        recording: Recording | None = self.job.recording.followed.again([*numbers, *(x[0] for x in columns)])
        if recording is None or not all(map(LARGEST.__ge__, map(abs, recording.slots))):  # nor NaN
            return None
        if self.job.update.far != self.job.update.far_in(recording.slots):
            return None
        if self.signs is not None and signs_of(seen, recording, self.job.settings) is not self.signs:
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
    """The set of the parameters that are in bf16 (`replaced_params`)."""
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


def again(book: Bookkeeping, groups: Sequence[dict[str, Any]]) -> Planned | None:
    """The next step, if its jobs are those of an earlier one with other numbers; None if that is not known."""
    seen: Seen | None = book.seen
    if seen is None:
        return None
    have, grads = _gradients(seen)
    plan: _Plan | None = seen.structure.table("plans").get(have)
    if plan is None or plan.narrow is not book.narrow or plan.meanings != _meanings():
        return None
    has_changed, numbers = plan.read(groups)
    if numbers is None or grads is None or not plan.guard(*grads):
        return None
    jobs: list[Job] = []
    for part in plan.parts:
        job = part.again(groups[part.group], numbers[part.group], seen)
        if job is None:
            return None
        jobs.append(job)
    return Planned(jobs, plan.may_skip, has_changed)


def note(book: Bookkeeping, groups: Sequence[dict[str, Any]], names: Sequence[str], jobs: Sequence[Job]) -> None:
    """Called after a step that was planned: its plan is that of later steps that are like it, if they may be.

    `names` are the settings that the class reads.
    """
    seen: Seen | None = book.seen
    settings = [GroupNumbers(group, names) for group in groups]
    told = list(map(_told, groups, settings))
    if seen is None or None in told or not all(map(_may_be_again, jobs)):
        return
    have, grads = _gradients(seen)
    if grads is None or sum(len(job.params) for job in jobs) != sum(have):
        return
    parts = [_part(seen, groups, job) for job in jobs]
    may_skip = any(Settings.of(group).nonfinite == "skip" for group in groups)
    plan = _Plan(parts, names, told, torch_privates.guard(grads), _meanings(), book.narrow, may_skip)
    seen.structure.keep(seen.structure.table("plans"), have, plan)


def _meanings() -> list[Any]:
    """What names in settings mean: the strategies, and the backends that other code has registered."""
    return [*STRATEGIES.items(), *REGISTERED.values()]


def _gradients(seen: Seen) -> tuple[tuple[bool, ...], Sequence[Tensor] | None]:
    """Which of the parameters have gradients, and the parts of these; None if one is sharded in another way."""
    have = tuple(map(is_not, seen.grads, repeat(None)))
    there: list[Tensor] = list(compress(seen.grads, have))  # type: ignore[arg-type]
    parts = locals_of(there)
    return have, parts if parts is there or are_sharded_alike(there, [*compress(seen.params, have)]) else None


def _told(group: Mapping[str, Any], settings: GroupNumbers) -> Any:
    """What equals that of another step if settings differ in numbers only; None if they may be read in other ways."""
    is_plain = type(group) is dict and settings.key is not None and isinstance(group.get(KEYS[0], ""), str)
    return (settings.key, *map(group.get, KEYS)) if is_plain else None


def _may_be_again(job: Job) -> bool:
    """Returns True for a job of which nothing but numbers can change while its tensors are alike."""
    captured = job.recording.captured
    changes_others = captured.clears_gradient or captured.small or "grad" in job.update.outputs
    return job.recording.followed is not None and captured.seen_as is None and not changes_others


def _part(seen: Seen, groups: Sequence[Any], job: Job) -> _Part:
    p, group = job.params[0], next(i for i, group in enumerate(groups) if group is job.group)
    counts = kind_in(seen, p, *seen.state_of([p])).tensors
    signs = signs_of(seen, job.recording, job.settings)
    return _Part(replace(job, kept={}), group, counts, signs)
