"""One optimizer step: plans every group, rejects what cannot run, then updates; a rejected step changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager import rejections
from collage_neuron.eager import step as eager_step
from collage_neuron.errors import StepInterrupted, UnsupportedUpdate
from collage_neuron.optimizer import first_step_report, group_settings, load_checks
from collage_neuron.optimizer.launches import finish, launches_of
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.runtime import nonfinite, step_call, step_plan
from collage_neuron.runtime.preconditions import check_once, is_left_alone
from collage_neuron.runtime.step_call import Call, Measured, check_environment
from collage_neuron.runtime.step_plan import Job, job_of, plan
from collage_neuron.settings import DRAWN, Settings
from collage_neuron.states import (
    coarse_writes,
    external_writes,
    low_words,
    param_checks,
    replaced_params,
    shared_memory,
    step_inventory,
    strategy_checks,
    visible_states,
)
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping, params_of
from collage_neuron.states.sharding import settle_gradients
from collage_neuron.trace import dry_run, replay_validation, replayed_steps
from collage_neuron.trace.code_inspection import Asked
from collage_neuron.trace.recorded_classes import is_traced, settings_of
from collage_neuron.trace.step_end import Launching
from collage_neuron.trace.step_kinds import StepKind, Traces
from collage_neuron.trace.traced_step import TracedStep, why_not
from collage_neuron.validation import validate


class Watcher(Protocol):
    """The interface of a monitor, which receives the measurements of steps."""

    def due(self) -> bool:
        """Returns True if the next step is to be measured."""

    def stepped(self, measured: list[Measured]) -> None:
        """Called after a step with the measurements of its updates, which are empty unless the step was due."""


Written = list[tuple[list[torch.Tensor], list[int]]]
"""Tensors that a step writes, and their versions before it, for each backend."""


def take_step(base: type[Optimizer], optimizer: Optimizer, call: Call) -> Any:
    """Runs one step of `optimizer` with the rewritten update of the class `base`; returns what `step()` returns."""
    with step_call.plain_defaults(), step_call.CollectorPaused():
        check_environment()
        ours = bookkeeping(optimizer)
        if ours.interrupted:
            raise StepInterrupted(ours.interrupted)
        watcher = ours.watcher
        due = watcher is not None and watcher.due()
        if ours.compiled_with:  # until the first step
            replaced_params.follow(optimizer)
            first_step_report.hint_at_source(base, optimizer)
        coarse_writes.look(optimizer, ours)
        if ours.leaving is None:
            low_words.leave_all(optimizer, ours)
        if ours.joined:
            load_checks.join_again(optimizer)
        ours.seen = step_inventory.look(optimizer)
        if not step_inventory.once(optimizer, "settled", partial(_is_settled, optimizer)):
            visible_states.widen_counts(optimizer)
            replaced_params.settle_moved(optimizer)
            ours.seen = step_inventory.look(optimizer)
        try:
            measured, returned = _taken(base, optimizer, call, ours, due)
        finally:
            ours.seen = None
        if watcher is not None:
            watcher.stepped(measured)
        return returned


def _is_settled(optimizer: Optimizer) -> bool:
    """Returns False if states are to be put right before a step."""
    return not (visible_states.narrow_counts(optimizer) or replaced_params.moved(optimizer))


def may_be_recorded(base: type[Optimizer], optimizer: Optimizer, call: Call) -> bool:
    """Returns False if the next step runs as written, as far as is known, or is traced."""
    ours = bookkeeping(optimizer)
    if is_traced(base, optimizer) or (call.closure is not None and ours.as_written):
        return False  # to try would evaluate the closure once more
    is_first = not (ours.steps or optimizer.state) and any(p.grad is not None for p in params_of(optimizer))
    return not ours.as_written or is_first


def _taken(base: type[Optimizer], optimizer: Optimizer, call: Call, ours: Bookkeeping, due: bool) -> eager_step.Taken:
    """Takes a recorded step, a traced one, or one as written, and measures it if that is `due`."""
    refusal = None
    if not call.problem and may_be_recorded(base, optimizer, call):
        try:
            measured = _planned_and_taken(base, optimizer, ours, due)
        except UnsupportedUpdate as error:
            refusal = error
        else:
            ours.as_written = ""
            return eager_step.Taken(measured, call.loss)
    with rejections.graphs_left_out(base, optimizer):
        tracing, why = _tracing(base, optimizer, call, ours, due)
        refusal = refusal or UnsupportedUpdate(call.problem or ours.as_written or why)
        return eager_step.take(base, optimizer, refusal, call, partial(nonfinite.decision, optimizer), due, tracing)


def _tracing(
    base: type[Optimizer], optimizer: Optimizer, call: Call, ours: Bookkeeping, due: bool
) -> tuple[TracedStep | None, str]:
    """What keeps the operations of the next step waiting, or None and why they cannot."""
    if not is_traced(base, optimizer):
        return None, "its steps are recorded"
    ours.traces = ours.traces or Traces(Asked())
    settle_gradients(optimizer)
    if why := call.problem or why_not(base, optimizer, ours.traces.asked):
        return None, f"{base.__name__} cannot be compiled: {why}"
    launching = Launching(job_of, partial(_take_traced, base), partial(_validate_traced, base))
    step = TracedStep(base, optimizer, ours.traces, launching, due)
    if step.given_up:
        return None, step.given_up
    structure = None if ours.seen is None else ours.seen.structure
    if not ours.traces.kinds and ours.traces.foreseen is not structure:
        ours.traces.foreseen = structure
        step.following = dry_run.following(base, optimizer) if ours.following is None else ours.following
        ours.following = None
    return step, ""


def _take_traced(
    base: type[Optimizer], optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None
) -> list[Measured]:
    """Takes a step that has been traced; with a mask, it is not known yet whether it is skipped."""
    ours = bookkeeping(optimizer)
    for job in jobs:
        visible_states.learn(ours, job.recording.captured)
    _check_named(optimizer, jobs)
    _warn_of_formats(base, optimizer, jobs)
    written: Written = []
    try:
        measured = take(optimizer, jobs, finite, written)
    except BaseException as error:  # KeyboardInterrupt among them: a loop may catch it and step again
        _note_interruption(optimizer, error, written)
        raise
    ours.as_written = ""
    if first_step_report.SAID not in ours.told:
        first_step_report.report(base, optimizer, jobs)
    return measured


def _validate_traced(
    base: type[Optimizer],
    optimizer: Optimizer,
    kind: StepKind,
    numbers: Sequence[float],
    params: list[Any],
    jobs: list[Job],
) -> None:
    """Validates a step that has been traced, by its calls."""
    calls = replay_validation.Calls(kind, numbers, params)
    validate.check(base, optimizer, jobs, take, lambda job: calls, kind.validated)


def _check_named(optimizer: Optimizer, jobs: list[Job]) -> None:
    strategies = [Settings.of(group).strategy for group in optimizer.param_groups]
    if any(not isinstance(strategy, str) for strategy in strategies):
        strategy_checks.check_names(optimizer, strategies, ((job.group, job.recording.captured.states) for job in jobs))


def _note_interruption(optimizer: Optimizer, error: BaseException, written: Written) -> None:
    """Notes, and says, of a step that raises after it has written tensors that it was interrupted."""
    if any(list(map(torch_privates.version, tensors)) != versions for tensors, versions in written):
        ours = bookkeeping(optimizer)
        ours.interrupted = _interruption(error)
        if isinstance(error, Exception):
            raise StepInterrupted(ours.interrupted) from error


def _planned_and_taken(base: type[Optimizer], optimizer: Optimizer, ours: Bookkeeping, due: bool) -> list[Measured]:
    """Plans, checks and takes a step; returns its measurements, if they are `due`."""
    grads = ((), None) if ours.seen is None else ours.seen.gradients()
    if ours.seen is None or not shared_memory.lies_apart(ours.seen, shared_memory.RECORDED, grads):
        _check_apart(optimizer)
    again = None if due or ours.compares else step_plan.again(ours, optimizer.param_groups, grads)
    jobs = _planned(base, optimizer, due) if again is None else again.jobs
    external_writes.drop_stale(optimizer)
    if again is None or again.has_other_settings:
        group_settings.warn_of_changes(base, optimizer, jobs)
    if again is None:
        validate.check(base, optimizer, jobs, take, replay_validation.of_recording)
    else:  # it is not due, and its updates were validated when they were planned
        ours.validated.steps += 1
    finite = nonfinite.decision(optimizer) if again is None or again.may_skip else None
    written: Written = []
    try:
        taken = jobs if finite is None else nonfinite.not_skipped(optimizer, jobs, finite)
        measured = take(optimizer, taken, finite, written)
        if again is None:
            param_checks.forget(optimizer)
        external_writes.remember_step(optimizer)
    except BaseException as error:  # KeyboardInterrupt among them: a loop may catch it and step again
        _note_interruption(optimizer, error, written)
        raise
    if first_step_report.SAID not in ours.told:
        first_step_report.report(base, optimizer, jobs)
    if again is None and not due and len(taken) == len(jobs):  # states are as the jobs want them
        step_plan.note(ours, optimizer.param_groups, settings_of(base), jobs)
    return measured


def _check_apart(optimizer: Optimizer) -> None:
    """Raises ValueError if memory of a parameter or a state is also that of another tensor."""
    params = [p for p in params_of(optimizer) if p.grad is not None]

    def written() -> list[tuple[str, torch.Tensor]]:
        check_once(optimizer)
        own = ((k, x) for p in params for k, x in dict.items(optimizer.state.get(p, {})))
        return [("param", p) for p in params if not is_left_alone(p)] + [(k, x) for k, x in own if torch.is_tensor(x)]

    seen = step_inventory.of(optimizer)
    shared_memory.check_apart(seen, shared_memory.RECORDED, written, [p.grad for p in params])


def _planned(base: type[Optimizer], optimizer: Optimizer, due: bool) -> list[Job]:
    """The jobs of a step, planned with all checks."""
    records, groups = replayed_steps.of_step(base, optimizer), enumerate(optimizer.param_groups)
    jobs = [job for i, group in groups for job in plan(base, optimizer, group, i, records, due)]
    _check_named(optimizer, jobs)
    _warn_of_formats(base, optimizer, jobs)
    return jobs


def _warn_of_formats(base: type[Optimizer], optimizer: Optimizer, jobs: list[Job]) -> None:
    """Warns of states that turn out to need more bits than their formats have, or than the user asked for."""
    if bookkeeping(optimizer).budget is not None:
        group_settings.warn_of_bytes(optimizer, jobs)
    for job in jobs:
        if job.imprecise:
            strategy_checks.warn_imprecise(
                base, optimizer, job.recording.captured.graph, job.settings, job.update.formats
            )


def _interruption(error: BaseException) -> str:
    """What a user has to know after an error in the middle of a step."""
    return (
        f"a step was interrupted by an error ({type(error).__name__}: {error}): some parameters and states may have "
        "been updated and others not, and the step counts were not advanced, so that another step would update some "
        "twice; load the last checkpoint, of the model and with optimizer.load_state_dict(), before the next step"
    )


def take(
    optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None, written: Written | None = None
) -> list[Measured]:
    """Takes the planned step; returns the measurements of its updates.

    If `finite` is given and false, the jobs of groups with `nonfinite="skip"` change nothing.
    The tensors that the backends write are added to `written`, before they are written.
    """
    measured = _run(optimizer, jobs, finite, [] if written is None else written)
    drawing: dict[int, dict[str, Any]] = {}
    for job in jobs:
        finish(optimizer, job)
        if job.update.draws:
            drawing[id(job.group)] = job.group
    for group in drawing.values():
        group[DRAWN] = group.get(DRAWN, 0) + 1  # the next step draws other random bits
    return measured


def _run(optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None, written: Written) -> list[Measured]:
    """Passes all jobs of each backend to it as one step."""
    measured: dict[torch.nn.Parameter, Measured] = {}
    for backend in dict.fromkeys(map(attrgetter("backend"), jobs)):
        own = [job for job in jobs if job.backend is backend]
        launches = [launch for job in own for launch in launches_of(optimizer, job, finite)]
        tensors = _version_witnesses(backend, launches)
        written.append((tensors, list(map(torch_privates.version, tensors))))
        measures = backend.run(launches) or ()  # a backend that measures nothing may return None
        measuring = [(job, p) for job in own if job.update.sums for p in job.params]
        if len(measures) != len(measuring):
            raise RuntimeError(
                f"backend {backend.name!r} returned {len(measures)} measurements, not {len(measuring)}: `run` returns "
                "one for each parameter of the updates that measure themselves, and none for others"
            )
        for (job, p), (sums, counts) in zip(measuring, measures, strict=True):
            names = job.update.sums, job.update.counts
            if finite is not None and job.settings.nonfinite == "skip":
                sums = torch.where(finite, sums, math.nan)
            measured[p] = Measured(p, names, sums, counts, job.recording.scalars.get("step"))
    # A tensor is hashed in Python: not for each parameter if nothing is measured.
    return [measured[p] for job in jobs for p in job.params if p in measured] if measured else []


def _version_witnesses(backend: Backend, launches: Sequence[Launch]) -> list[torch.Tensor]:
    """Tensors of which one at least has another version if an error of the backend leaves anything written."""
    if backend.counts_first:
        return [row[0] for launch in launches for row in launch.writes[:1] if row]
    return list(chain.from_iterable(chain.from_iterable(each.writes for each in launches)))
