"""Translation validation: checks the rewritten update against the optimizer's own `step()` before a step.

At steps 1, 2, 4, 8, ... and whenever the update was not validated before, a sample of a parameter of every job is
stepped twice: by the rewritten update, and by the step's own calls on fp32 copies. If the results differ by more than
the formats and the arithmetic round, the step is not taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import BUILT_IN, format_named
from collage_neuron.numerics.rounding import digits
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.runtime import nonfinite
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import gradient
from collage_neuron.validation import arrived, sample
from collage_neuron.validation.comparison import Found
from collage_neuron.validation.perturbed_replay import InFp32, NoSample, expected
from collage_neuron.validation.sample import Plan, Sample

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

T = TypeVar("T")
Take = Callable[[Optimizer, list["Job"], Tensor | None], Any]
"""A function that runs jobs of an optimizer as the step does, including the stores, if all gradients are finite."""

STILL, FEW = 0.8, 16
"""A state stands still if this share of the elements that fp32 would move, of at least this many, does not move."""
JOBS, GROUPS = 2, 8
"""The number of jobs of one group with the same update that are validated at a time; of groups with the same one."""


class StandsStill(UserWarning):
    """A state no longer changes, because it is stored in bf16 and each change is below half an ulp."""


@dataclass
class History:
    """The history of validation of an optimizer."""

    steps: int = 0
    known: set[Any] = field(default_factory=set)
    """Recorded updates that were validated, with their backends; a copy validates its own."""
    told: set[str] = field(default_factory=set)
    """States that the user was warned of."""
    compared: int = 0
    left_out: int = 0
    """Numbers of values that were compared, and of values whose result depends on rounding (`Expected.unsure`)."""
    not_covered: int = 0
    """Number of jobs for which no sample could be made."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the updates, which are objects of this process: a copy of the optimizer validates its first step."""
        return {**vars(self), "known": set()}


def history_of(optimizer: Optimizer) -> History:
    """The history of `optimizer`; an empty one if it has none yet."""
    ours = bookkeeping(optimizer)
    if ours.validated is None:
        ours.validated = History()
    found: History = ours.validated
    return found


def check(
    base: type[Optimizer],
    optimizer: Optimizer,
    jobs: Sequence[Job],
    take: Take,
    again: Callable[[Job], Again],
    known: set[Any] | None = None,
) -> None:
    """Validates the step that `jobs` are about to take, if that is due, or one of their updates is not `known`.

    These are those of the optimizer's history, unless others are given.

    Raises:
        TranslationError: a value is further off than rounding explains; nothing has been changed.
    """
    history = history_of(optimizer)
    steps, known = history.steps + 1, history.known if known is None else known
    is_new = not known.issuperset(map(_launched_by, jobs))
    if (is_new or is_due(steps)) and not os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY"):  # there every result is zero
        for job in list(chosen(jobs, steps, lambda job: _launched_by(job) not in known)):
            validate_job(base, optimizer, job, take, again(job), steps)
        known.update(map(_launched_by, jobs))
    history.steps = steps


_launched_by = attrgetter("update", "backend")


def is_due(steps: int) -> bool:
    """Returns True at steps 1, 2, 4, 8, ..."""
    return steps & (steps - 1) == 0


def is_next_due(optimizer: Optimizer) -> bool:
    """Returns True if the next step is to be validated."""
    return is_due(history_of(optimizer).steps + 1)


def _key(job: Job) -> Any:
    return (
        job.recording.captured.text,
        str(job.update.formats.keys()),
        job.backend.name,
        job.params[0].dtype,
        type(job.params[0]),
    )


def chosen(jobs: Sequence[Job], steps: int, is_new: Callable[[Job], bool]) -> Iterator[Job]:
    """The jobs to validate in a step: if it is due, or they are new, a few of those alike, different ones each time."""
    due, turn = is_due(steps), steps.bit_length()
    alike: dict[Any, dict[int, list[Job]]] = {}
    for job in jobs:
        on = job.settings.validate == "on" and any(p.numel() for p in job.params)
        if on and (due or is_new(job)):
            alike.setdefault((_key(job), job.settings), {}).setdefault(id(job.group), []).append(job)
    for of_groups in alike.values():
        for of_one_group in _in_turn([*of_groups.values()], GROUPS, turn):
            yield from _in_turn(of_one_group, JOBS, turn)


def _in_turn(items: Sequence[T], most: int, turn: int) -> Sequence[T]:
    """At most so many of the items; over the turns all of them."""
    first = turn * (most if len(items) > most else 1) % len(items)
    return [*items[first:], *items[:first]][:most]


class Again(Protocol):
    """How a step is taken again, on a sample."""

    def plan(self, job: Job, p: torch.nn.Parameter, flat: Tensor) -> Plan | None:
        """The elements of `p` to take: those in `flat`, if shapes do not matter; None if there is no sample."""

    def states(
        self, job: Job, p: torch.nn.Parameter, param: Tensor, names: list[str], g: torch.Generator
    ) -> Mapping[str, Any]:
        """States of a parameter with the drawn values `param` (`sample.States`)."""

    def in_fp32(self, p: torch.nn.Parameter, taken: Sample, g: torch.Generator) -> InFp32:
        """What takes the step of a sample of `p`."""


def validate_job(base: type[Optimizer], optimizer: Optimizer, job: Job, take: Take, again: Again, steps: int) -> None:
    """Compares what a job does to a sample of one of its parameters with the same step, taken `again` in fp32."""
    history = history_of(optimizer)
    params = [p for p in job.params if p.numel()]
    p = params[steps.bit_length() % len(params)]
    job = job.of_param(p)
    taken = _sample(optimizer, job, p, steps, again)
    if taken is None:
        history.not_covered += 1
        return
    if not taken.grad.numel():  # a shard without elements
        return
    twin = again.in_fp32(p, taken, torch.Generator().manual_seed(steps))
    try:
        wanted = expected(twin)
    except NoSample:
        history.not_covered += 1
        return
    before = {name: taken.components(name) for name in taken.formats}
    skips = job.settings.nonfinite == "skip"
    take(taken.optimizer, [taken.job], nonfinite.all_finite([taken.param]) if skips else None)
    sample.fetch(taken)
    found = Found(base, optimizer, p, taken, before, wanted, twin, steps)
    compared, left_out = found.compare()
    if compared:
        _warn_of_still(found, history)
        arrived.look(found, job)
    history.compared, history.left_out = history.compared + compared, history.left_out + left_out


def _sample(optimizer: Optimizer, job: Job, p: torch.nn.Parameter, steps: int, again: Again) -> Sample | None:
    turn = steps.bit_length()
    if p.device.type in sample.DEVICES:
        planned = again.plan(job, p, torch.arange(sample.SIZE, dtype=torch.int64, device="cpu"))
        of_steps = partial(again.states, job, p)
        return None if planned is None else sample.draw(optimizer, job, p, planned, turn, of_steps)
    grad = gradient(p).detach()  # under tensor parallelism all processes add it up, with elements or without
    planned = again.plan(job, p, sample.spread(grad, turn))
    return None if planned is None else sample.take(optimizer, job, p, grad, planned)


def _warn_of_still(found: Found, history: History) -> None:
    """Warns once of a state that fp32 would move and its format does not, unless the strategy is narrow by choice."""
    strategy = found.taken.job.settings.strategy
    if not isinstance(strategy, str) or digits(format_named(STRATEGIES[strategy].slow)) <= digits(BUILT_IN["bf16"]):
        return
    told = {"param", *bookkeeping(found.optimizer).told, *history.told}
    there = found.optimizer.state.get(found.param, {})  # others are made by this step
    for name, fmt in found.taken.job.update.formats.items():
        if name in told or name not in there or fmt.draw is not None or digits(fmt) > digits(BUILT_IN["bf16"]):
            continue
        count, still = found.still(name, fmt)
        if count >= FEW and still >= STILL * count:
            history.told.add(name)
            tried = found.taken.grad.numel()
            warn_user(
                f"the state {name!r} of {found.base.__name__} stands still: of {tried} elements that were "
                f"tried fp32 would change {count}, and in {fmt.name} {still} of these stay as they are, since "
                "they move by less than half an ulp in a step. Keep it wider: strategy='full', or a mapping such as "
                f"{{'param': 'bf16x2', {name!r}: 'bf16x2'}}",
                StandsStill,
            )
