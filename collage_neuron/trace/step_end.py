"""The end of a step whose operations wait: what it did is taken apart, launched, and stored where it has left it.

The first step of a kind is taken apart into updates of single parameters (`partition`), which go through the passes and
backends; a later one that made the same calls launches the same updates with its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.runtime.process_agreement import LAUNCHES
from collage_neuron.runtime.step_call import Measured
from collage_neuron.states import shared_memory, step_inventory, visible_states
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.trace import adopted_tensors, left_objects, shards
from collage_neuron.trace.calls import Uncompiled, users_of
from collage_neuron.trace.escapes import References, outliving
from collage_neuron.trace.placeholders import are_marked, give
from collage_neuron.trace.step_kinds import Before, Left, StepKind, check_states, planned_of, with_states

if TYPE_CHECKING:
    from collage_neuron.eager.presentation import Presentation
    from collage_neuron.passes.ir.update import Recording
    from collage_neuron.runtime.step_plan import Job
    from collage_neuron.trace.deferred_calls import DeferredCalls
    from collage_neuron.trace.traced_step import TracedStep

_NO_STATE: dict[Any, Any] = {}
_requires_grad = attrgetter("requires_grad")


class Launching(NamedTuple):
    """How updates are launched."""

    plan: Callable[[Optimizer, dict[str, Any], list[Any], Recording, bool], Job]
    """The job of parameters of a group that share a recording; whether it is measured."""
    take: Callable[[Optimizer, list[Job], torch.Tensor | None], list[Measured]]
    """Takes jobs, which change nothing if a mask is given and false."""
    validate: Callable[[Optimizer, StepKind, Sequence[float], list[Any], list[Job]], None]
    """Raises TranslationError for jobs that do not do what the calls of a step do."""


class Began(NamedTuple):
    """What a step began with."""

    presentation: Presentation
    seen: step_inventory.Seen | None
    params: list[Any]
    before: Before
    references: References
    requires_grad: list[bool]


def _check_gradients(jobs: Iterable[Job]) -> None:
    """Raises Uncompiled for gradients of another dtype than their parameters (accumulated in fp32) that are written."""
    for job in jobs:
        if "grad" in job.update.outputs and any(p.grad is not None and p.grad.dtype != p.dtype for p in job.params):
            raise Uncompiled("step() writes to gradients that are accumulated in fp32")


class StepEnd:
    """The end of one step, while its values wait still."""

    def __init__(self, step: TracedStep, began: Began, mode: DeferredCalls) -> None:
        self._step, self._began, self._mode = step, began, mode
        self._optimizer, self._traces = step.optimizer, step.traces
        self.is_over = False
        """True once all is as it was between steps: what is raised does not come from values that wait."""

    def launch(self) -> list[Measured]:
        """Launches what the step did.

        Raises:
            Uncompiled, or UnsupportedUpdate: it cannot be launched, and is as it was.
        """
        return self._launched(self._kind())

    def _kind(self) -> StepKind:
        """The kind of the step."""
        left, calls, before = self._left(), self._mode.calls, self._began.before
        for kind in self._traces.kinds:
            # For the same calls it is the same list (`CallSequence`), so that nothing is compared again.
            if calls is kind.calls and kind.before == before and kind.left == left:
                self._mode.reads.add_numbers(kind.reads)
                return self._traces.add(kind)
        named = with_states(before.named, calls)
        planned, reads = planned_of(before, named, left, self._mode)
        planned = [each.followed_by(self._step.following) for each in planned]
        for each in planned if self._step.has_parts else ():
            shards.check_parts(each.recording.captured, self._step.of_part is None)
            shards.check_sent(each.recording.captured, [self._began.params[i] for i in each.params])
        quick, users = [(call.quick(), call.method) for call in calls], users_of(calls, self._mode.tensors)
        cones = self._mode.reads.cones
        return self._traces.add(StepKind(before, named, cones, left, left.named(), planned, reads, quick, users))

    def _left(self) -> Left:
        params, own = self._began.params, self._began.presentation.states()
        states, grads = [own.get(id(p), _NO_STATE) for p in params], [p.grad for p in params]
        check_states(states)
        if self._began.requires_grad != list(map(_requires_grad, params)):
            raise Uncompiled("step() changes requires_grad")
        began = self._began.presentation
        are_same = step_inventory.are_same(began.all_groups, self._optimizer.param_groups)
        if not are_same or began.listed != [*map(id, params_of(self._optimizer))]:
            raise Uncompiled("step() changes optimizer.param_groups")  # kinds know groups by their numbers
        values, has_shards = list(chain.from_iterable(map(dict.values, states))), self._began.presentation.has_shards
        for p, state, g in zip(params, states, grads, strict=True) if has_shards else ():
            shards.check_sharded(p, [*state.values(), g])
        left = Left(
            list(map(tuple, states)),
            self._mode.places.of_each(shards.parts(values, has_shards)),
            self._mode.places.of_each(shards.parts(params, has_shards)),
            self._mode.places.of_each(shards.parts(grads, has_shards)),
        )
        if any(place is None and g is not None for place, g in zip(left.gradients, grads, strict=True)):
            raise Uncompiled("step() gives a parameter another gradient")
        return left

    def _launched(self, kind: StepKind) -> list[Measured]:
        """Launches the updates of a step."""
        if kind.makes_states:
            # One that a device skips later would leave zeros as states, which the next one reads.
            self._step.decide()
        # Before anything is exchanged back: it counts references, and computes numbers of what is presented.
        numbers = self._outliving(kind)
        params, presentation, own = self._began.params, self._began.presentation, self._began.presentation.states()
        # Copies: while updates are launched, these dictionaries have what there was before the step.
        left = [(p, s, dict(s)) for p in params if (s := own.get(id(p))) is not None]
        self._step.withdraw()
        presentation.restore_words()
        self._mode.adopted.exchange_states(adopted_tensors.exchange_back)
        left_objects.put_back(self._changed(kind), kind, self._began.references.objects or self._mode.tensors)
        jobs = self._checked_jobs(kind, left)
        presentation.inside = self._mode.places.inside[: self._mode.places.first]
        self.is_over = True  # all is as it was between steps: what a backend raises does not come from placeholders
        measured = self._step.launching.take(self._optimizer, jobs, self._step.finite) if jobs else []
        self._keep_objects(kind, {id(p): values for p, _, values in left})
        for t, value in numbers:
            give(t, value)
        ours = bookkeeping(self._optimizer)
        self._traces.presentation, self._traces.structure, ours.as_written = presentation, ours.structure, ""
        presentation.let_go()
        return measured

    def _outliving(self, kind: StepKind) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The numbers that outlive the step, with their values."""
        references, marks = self._began.references, bookkeeping(self._optimizer).marks
        found = outliving(kind, self._mode, references, marks.held() if kind.changed else ())
        if are_marked([self._mode.tensors[i] for i in references.gradients]):
            self._traces.placeholders.renew()
        self._traces.temporaries = found.temporaries
        return [(self._mode.tensors[place], self._mode.reads.value(place).clone()) for place in found.numbers]

    def _checked_jobs(self, kind: StepKind, left: Sequence[tuple[Any, Any, dict[Any, Any]]]) -> list[Job]:
        """What is launched; if it cannot be, the step goes on with the states that it has `left`."""
        optimizer, seen = self._optimizer, self._began.seen
        if seen is not None and kind.before.keys == kind.left.keys and seen.has({id(p): s for p, s, _ in left}):
            bookkeeping(optimizer).seen = seen
        try:
            jobs = self._jobs(kind)
            _check_gradients(jobs)
            self._step.launching.validate(optimizer, kind, self._mode.numbers, self._began.params, jobs)
            # Last: what says that it launches is waited for by the others, so nothing may raise here after it.
            self._step.agree(LAUNCHES, shards.sent(jobs, self._began.params))
        except (Uncompiled, UnsupportedUpdate):
            step_inventory.changed(optimizer)
            self._began.presentation.enter()
            self._mode.adopted.exchange_states(adopted_tensors.exchange)
            for p, state, values in left:
                state.clear()
                state.update(values)
                optimizer.state[p] = state
            raise
        except BaseException:
            self.is_over = True  # all is as it was between steps
            raise
        return jobs

    def _keep_objects(self, kind: StepKind, left: Mapping[int, dict[Any, Any]]) -> None:
        """States have the objects that the step has `left` there, and their order."""
        params, has_shards = self._began.params, self._began.presentation.has_shards
        objects = [
            left[id(params[i])][name] if has_shards else self._mode.tensors[place] for i, name, _, place in kind.changed
        ]
        self._traces.temporaries = left_objects.keep_objects(
            self._changed(kind), kind, objects, self._traces.temporaries, len(self._began.references.holders)
        )
        met, states = self._mode.adopted, self._optimizer.state
        left_objects.keep_met({i: states[params[i]] for (i, _), _ in met.states()}, kind, self._mode)
        if (kind.changed or met.others) and (seen := step_inventory.of(self._optimizer)) is not None:
            bookkeeping(self._optimizer).seen = shared_memory.with_ours(seen)
        if kind.before.keys != kind.left.keys:
            now = self._began.presentation.states()
            left_objects.put_in_order({i: now[id(p)] for i, p in enumerate(params) if id(p) in now}, kind)
            for p, before, after, values in zip(params, kind.before.keys, kind.left.keys, kind.after, strict=True):
                visible_states.note_made(self._optimizer, p, now.get(id(p), {}), {*after} - {*before} - {*values})

    def _changed(self, kind: StepKind) -> left_objects.States:
        """The states that have other objects after the step."""
        return {i: self._optimizer.state[self._began.params[i]] for i, *_ in kind.changed}

    def _jobs(self, kind: StepKind) -> list[Job]:
        jobs = []
        for planned in kind.planned:
            group = self._optimizer.param_groups[planned.group]
            for numbers, recording in planned.parts(self._mode.numbers):
                job = self._job(group, numbers, recording)
                parts = job.by_factors
                jobs += (
                    [job]
                    if len(parts) == 1
                    else [self._job(group, tuple(numbers[i] for i in each), recording.of(each)) for each in parts]
                )
        return jobs

    def _job(self, group: dict[str, Any], numbers: tuple[int, ...], recording: Recording) -> Job:
        lists, params = self._traces.lists, [self._began.params[i] for i in numbers]
        if not step_inventory.are_same(lists.get(numbers, ()), params):
            lists[numbers] = params
        return self._step.launching.plan(self._optimizer, group, lists[numbers], recording, self._step.due)
