"""A step whose operations wait: it runs once, on placeholders, and what it did is launched when it has returned.

The first step of a kind is taken apart into updates of single parameters (`lanes`), which go through the passes and
backends that captured updates go through; a later one that made the same calls launches the same updates with its own
numbers. Where something cannot be launched, all is computed as the step as written would have (`DeferredCalls.fill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import RunsAsWritten, StepSkipped, UnsupportedUpdate
from collage_neuron.runtime import fallback_warning, wrappers
from collage_neuron.runtime.preconditions import FLOATS, is_left_alone
from collage_neuron.runtime.process_agreement import AS_WRITTEN, LAUNCHES, RAISES, READS
from collage_neuron.runtime.step_call import Measured
from collage_neuron.settings import Settings
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import Inner, state_of
from collage_neuron.states.sharding import ORDINARY, TRIED
from collage_neuron.trace import adopted_tensors, left_objects, shards
from collage_neuron.trace.calls import Uncompiled, users_of
from collage_neuron.trace.code_inspection import ASKS, Asked
from collage_neuron.trace.deferred_calls import DeferredCalls, Exchanged
from collage_neuron.trace.escapes import References, are_marked, outliving
from collage_neuron.trace.placeholders import give, withdraw
from collage_neuron.trace.step_kinds import (
    Before,
    Left,
    Placeholders,
    StepKind,
    Traces,
    check_states,
    planned_of,
    with_states,
)
from collage_neuron.trace.torch_errors import is_of_torch, repeated

if TYPE_CHECKING:
    from collage_neuron.eager.presentation import Presentation
    from collage_neuron.passes.ir.update import Recording
    from collage_neuron.runtime.step_plan import Job


class Launching(NamedTuple):
    """How updates are launched."""

    plan: Callable[[Optimizer, dict[str, Any], list[Any], Recording, bool], Job]
    """The job of parameters of a group that share a recording; whether it is measured."""
    take: Callable[[Optimizer, list[Job], torch.Tensor | None], list[Measured]]
    """Takes jobs, which change nothing if a mask is given and false."""
    validate: Callable[[Optimizer, StepKind, Sequence[float], list[Any], list[Job]], None]
    """Raises TranslationError for jobs that do not do what the calls of a step do."""


_NO_STATE: dict[Any, Any] = {}
_requires_grad, _is_cpu = attrgetter("requires_grad"), attrgetter("is_cpu")


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


class TracedStep:
    """One traced step."""

    def __init__(
        self,
        base: type[Optimizer],
        optimizer: Optimizer,
        traces: Traces,
        launching: Launching,
        due: bool,
    ) -> None:
        """Begins nothing yet; the step is measured if that is `due`."""
        self.optimizer, self.traces, self._launching, self._due = optimizer, traces, launching, due
        self._base, self._name = base, base.__name__
        self.following: Mapping[str, Recording] = {}
        """The steps after this one, by the texts of updates, where these do not show what states are for."""
        self._mode: DeferredCalls | None = None
        self._began: Began
        self._is_planned = False
        """True if an earlier step has planned this one."""
        self._last: list[StepKind] = []
        """The kind of the last step."""
        self._unused: list[torch.Tensor] = []
        """What that has made, and this one will not make once more."""
        self.may_repeat = False
        """True if the step raised since its values were waiting: torch's own errors say so."""
        self._has_raised = self._has_agreed = False
        self._finite: torch.Tensor | None = None
        """The mask that is true if all gradients are finite, as long as nobody has waited for it."""
        self._is_forbidden = self._reads = False
        """True if a filter of `warnings` makes it an error to run as written."""
        self._of_part = wrappers.shape_of_part(optimizer, step_inventory.of(optimizer))
        """The shape of a parameter that is a part of one, if nobody knows who has the others."""

    @property
    def given_up(self) -> str:
        """Why no step of the optimizer is traced any more; empty if the next one is."""
        if not (self.traces.gives_up and self.may_run_as_written):
            return ""
        return f"{self._name} cannot be compiled: {self.traces.why}"

    @property
    def waiting(self) -> Placeholders:
        """What makes placeholders instead of memory for fp32 values."""
        return self.traces.placeholders

    def decides_later(self, finite: torch.Tensor) -> bool:
        """Returns True if the step may begin before it is known whether gradients are finite.

        On a device, where the last step was launched, and found the same states: this one makes none, most likely.
        """
        seen, traces = step_inventory.of(self.optimizer), self.traces
        is_steady = seen is not None and traces.presentation is not None and seen.structure is traces.structure
        all_skip = all(Settings.of(group).nonfinite == "skip" for group in self.optimizer.param_groups)
        self._finite = None if finite.is_cpu or not (is_steady and all_skip) else finite
        return self._finite is not None

    def decide(self) -> None:
        """Waits for that, if nobody has yet: something has to be known before the step is launched."""
        finite, self._finite = self._finite, None
        if finite is not None and not bool(finite):
            raise StepSkipped

    def planned(self, seen: step_inventory.Seen) -> tuple[Presentation, set[int]] | None:
        """What an earlier step has planned, with the ids of its tensors, if what this one has `seen` is the same."""
        kept, self.traces.presentation = self.traces.presentation, None  # the next step's if this one is launched
        is_other = kept is None or seen.structure is not self.traces.structure or bookkeeping(self.optimizer).pins
        self._is_planned = not is_other
        if kept is None or is_other:
            self.traces.lists.clear()  # parameters that have left the groups are in some
            return None
        return kept, kept.again(self.optimizer, seen)

    # --- before the step --------------------------------------------------------------------------------------------

    def begin(self, presentation: Presentation, seen: step_inventory.Seen | None, inside: list[Inner]) -> DeferredCalls:
        """The mode in which the step runs; values are presented, and optimizers are `inside` this one."""
        params = presentation.params()
        objects = self._objects(presentation, params)
        tensors = shards.parts(objects, presentation.has_shards)
        before = self.traces.before = self._before(presentation, params, objects)
        gradients = [places["grad"] for places in before.named if "grad" in places]
        places, owners = {id(objects[i]): i for i in gradients}, presentation.gradients.exchanged()
        also = shards.parts([g.owner for g in owners], presentation.has_shards)
        same = {id(t): places[id(g.wide)] for t, g in zip(also, owners, strict=True)}
        holders, flags = torch_privates.references(objects), list(map(_requires_grad, params))
        of_parts = torch_privates.references(tensors) if presentation.has_shards else []
        references = References(gradients, objects if presentation.has_shards else [], holders, of_parts)
        self._began = Began(presentation, seen, params, before, references, flags)
        kinds, spare = self.traces.kinds, self.traces.temporaries
        self.traces.temporaries = []  # the next step's if this one is launched
        earlier = [kind for kind in kinds if kind.before == before]
        is_like_last, self._last = bool(earlier) and earlier[0] is kinds[0], kinds[:1]
        spare, self._unused = (spare, []) if is_like_last else ([], spare)
        # Calls that are all in place have made nothing, and are those of the last step all the same.
        is_steady = bool(spare) or (is_like_last and kinds[0].makes_nothing)
        cones, steady = [k.cones for k in earlier], kinds[0].quick if is_steady else ()
        self._names: dict[int, adopted_tensors.Name] | None = None
        self._inside = inside
        are_same = presentation.is_as_before and presentation.gradients.are_as_before
        known = presentation.inside if are_same else ()
        self._mode = DeferredCalls(
            tensors, same, cones, spare, steady, self._compute, self._state_of, self._copy_of, known
        )
        self._mode.decide = self.decide
        self._mode.may_send = presentation.has_shards
        on_host = all(map(_is_cpu, params))
        if presentation.has_shards:
            self._mode.reading = self._reading
        elif on_host and self._of_part is None:
            self._mode.copy_into = presentation.copy_into
        if not presentation.has_shards and (not is_steady or kinds[0].fills):
            self._mode.see_made()
        self._meet_states(self._mode, params, on_host, is_like_last)
        return self._mode

    def _meet_states(self, mode: DeferredCalls, params: list[Any], on_host: bool, is_like_last: bool) -> None:
        """Makes states wait from the beginning that are not in words."""
        kinds = self.traces.kinds
        for p in params if not (on_host and kinds) else ():
            mode.meet_states(p, dict.get(self.optimizer.state, p, _NO_STATE), only_narrow=on_host)
        if on_host and kinds and kinds[0].met:
            met = [(i, name) for i, name in kinds[0].met if i < len(params)]
            states = [dict.get(self.optimizer.state, params[i], _NO_STATE).get(name) for i, name in met]
            if not (self._is_planned and is_like_last and mode.meet_all(met, states)):
                mode.meet_again(x for x in states if isinstance(x, torch.Tensor))
        mode.begins()

    def _objects(self, presentation: Presentation, params: list[Any]) -> list[torch.Tensor]:
        """What waits, by its places: of each parameter itself, its states and its gradient."""
        objects: list[torch.Tensor] = []
        owners, gradients = presentation.owners, presentation.gradients.of
        for key in map(id, params):
            objects += owners[key]
            if key in gradients:
                objects.append(gradients[key].wide)
        return objects

    def _before(self, presentation: Presentation, params: list[Any], objects: list[torch.Tensor]) -> Before:
        """How the step finds what waits: the object of the last step, if nothing is different."""
        known, outlines = self.traces.before, presentation.outlines
        dtype, are_parts = torch.get_default_dtype(), self._of_part is not None
        is_alike = self._is_planned and presentation.gradients.are_as_before
        if known is not None and is_alike and (known.dtype, known.are_parts) == (dtype, are_parts):
            return known
        numbers, count = {id(g): i for i, g in enumerate(self.optimizer.param_groups)}, 0
        before = Before(
            [],
            [outlines[id(p)].own for p in params],
            [numbers[id(g)] for _, g in presentation.groups.values()],
            list(presentation.dtypes.values()),
            [(t.shape, t.stride()) for t in objects],
            dtype,
            are_parts,
        )
        for key in map(id, params):
            names = [*outlines[key].names, *(["grad"] if key in presentation.gradients.of else [])]
            before.named.append(dict(zip(names, range(count, count + len(names)), strict=True)))
            count += len(names)
        return known if known is not None and before == known else before  # kinds are compared with the object first

    def _copy_of(self, x: torch.Tensor) -> torch.Tensor:
        presentation, objects = self._began.presentation, self._began.references.objects
        if not self._has_parts:
            return presentation.copy_of(x)
        if self._of_part is not None or not self._reads:
            return shards.no_copy(x)
        return presentation.copy_of(next(t for t in objects if torch_privates.part(t) is x))

    @contextmanager
    def _reading(self, reads: Sequence[tuple[int, int]]) -> Iterator[None]:
        """A context in which values over shards are read, as of all processes: these have to read the same."""
        assert self._mode is not None
        self._agree(READS, (reads, [call.func.__name__ for call in self._mode.calls]))
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def _state_of(self, x: torch.Tensor) -> adopted_tensors.Name | None:
        """The parameter and the name of a state that is not in words; None for other tensors."""
        params = self._began.params
        if self._names is None:
            states = [state_of(self.optimizer, p, self._inside) for p in params]
            self._names = {id(t): (i, name) for i, own in enumerate(states) for name, t in own.items()}
        i, name = self._names.get(id(x), (0, ""))
        is_there = state_of(self.optimizer, params[i], self._inside).get(name) is x  # an id may be used again
        return (i, name) if is_there else None

    def missed(self, why: str) -> None:
        """Computes what waits in a step that cannot be launched any more."""
        self.compute(why)
        self.traces.missed(why)
        self._mode = None

    def put_off(self) -> None:
        """The step begins again after what comes now: nothing was done yet."""
        self.decide()
        self.end()
        if self._mode is not None:
            self._unused = self._unused or self._mode.let_go(len(self._began.references.holders))
        self._mode = None

    def go_on(self) -> None:
        """Called before it begins again: it may begin as the last one did, unless there was another in between."""
        is_last = self.traces.kinds[:1] == self._last
        self.traces.temporaries = self._unused if is_last else []
        self.traces.presentation = self._began.presentation if self._is_planned else None
        self._is_planned = False

    def raised(self, error: BaseException) -> None:
        """Called if the step raises, before anything else."""
        self.traces.temporaries = []  # the error's traceback has them
        self._has_raised, self._finite = True, None
        mode = None if self._has_agreed else self._mode
        if mode is not None and not self._is_forbidden and (mode.failed is not None or is_of_torch(error)):
            self.may_repeat = self.may_run_as_written
            self.traces.missed(f"with values that wait, step() raises {type(error).__name__}: {error}")
        if isinstance(error, Exception) and not self.may_repeat:  # the others wait for what this process says
            with suppress(Exception):
                self._agree(RAISES)
        self._has_agreed = True

    def check_as_written(self, why: str) -> None:
        """Raises UnsupportedUpdate if the step may not run as written; `why` says why it cannot be launched."""
        if not self.may_run_as_written:
            if not self._has_raised:
                self.traces.missed(why)
            said = why if self._of_part is None else shards.without_whole(why, self._of_part)
            raise UnsupportedUpdate(f"{self._name} cannot be compiled: {said}")
        try:
            fallback_warning.warn(
                self._base, self.optimizer, UnsupportedUpdate(f"{self._name} cannot be compiled: {why}")
            )
        except RunsAsWritten:
            self._is_forbidden = True
            raise

    @property
    def may_run_as_written(self) -> bool:
        """Returns True if a step that cannot be launched may run as written."""
        if self._is_forbidden or self._of_part is not None:
            return False
        return all(Settings.of(group).arithmetic == "fp32" for group in self.optimizer.param_groups)

    @property
    def _has_parts(self) -> bool:
        """Returns True if the update of a parameter may be that of a part."""
        return self._began.presentation.has_shards or self._of_part is not None

    @property
    def is_untouched(self) -> bool:
        """Returns True while values wait with which nothing was done yet."""
        if self._mode is None or not self._mode.is_untouched:
            return False
        return self._began.presentation.gradients.are_presented(self._began.params)

    def compute(self, why: str) -> None:
        """Computes what waits."""
        if self._mode is not None:
            self._mode.fill(why)
            self._mode.settle()

    def _compute(self) -> None:
        assert self._mode is not None
        self.check_as_written(self._mode.why)
        self._agree(AS_WRITTEN)
        self.traces.computed()
        self._began.presentation.compute()

    def _agree(self, planned: int, sent: object = None) -> None:
        """Over shards, comes to an agreement with other processes, once a step, and before it about what is read.

        Raises:
            UnsupportedUpdate: one of them cannot launch it.
            ValueError: as of `agreed`.
        """
        if self._has_agreed or not self._began.presentation.has_shards:
            return
        self._has_agreed = True
        decided = self._began.presentation.agreed(planned, sent)
        self._has_agreed = decided != READS
        if decided != planned:
            raise UnsupportedUpdate("another process, which has parts or replicas of a parameter, cannot launch it")

    # --- after it ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """All tensors have the classes and values that they had, unless they were computed."""
        self._withdraw()
        if self._mode is not None:
            self._mode.give_back()

    def _withdraw(self) -> None:
        if self._mode is not None:
            presentation = self._began.presentation
            withdraw(chain(presentation.presented, presentation.gradients.pairs))

    def finish(self) -> list[Measured] | None:
        """Launches what the step did; None if it has to be stored as a step as written."""
        mode = self._mode
        assert mode is not None
        measured = None
        if mode.failed is not None:
            raise repeated(mode.failed) from mode.failed
        if mode.is_filled:  # first: a state whose value is put off would be taken for what stands for another one
            mode.settle()
        if mode.has_met:
            mode.put_originals(filter(None, (dict.get(self.optimizer.state, p) for p in self._began.params)))
        if not mode.is_filled:
            try:
                measured = self._launched(self._kind(mode), mode)
            except Exchanged:  # nobody knows what is inside which object: it cannot be computed either
                raise
            except (Uncompiled, UnsupportedUpdate) as error:
                mode.fill(str(error))
        if measured is None:
            mode.settle()
            self.traces.missed(mode.why)
        self._mode = None  # it refers to this object: memory would wait for the collector
        return measured

    def _kind(self, mode: DeferredCalls) -> StepKind:
        """The kind of the step."""
        left, calls, before = self._left(mode), mode.calls, self._began.before
        for kind in self.traces.kinds:
            # For the same calls it is the same list (`CallSequence`), so that nothing is compared again.
            if calls is kind.calls and kind.before == before and kind.left == left:
                mode.add_values(kind.reads)
                return self.traces.add(kind)
        named = with_states(before.named, calls)
        planned, reads = planned_of(before, named, left, mode)
        planned = [each.followed_by(self.following) for each in planned]
        for each in planned if self._has_parts else ():
            shards.check_parts(each.recording.captured, self._of_part is None)
            shards.check_sent(each.recording.captured, [self._began.params[i] for i in each.params])
        quick, users = [(call.quick(), call.method) for call in calls], users_of(calls, mode.tensors)
        cones = mode.cones
        return self.traces.add(StepKind(before, named, cones, left, left.named(), planned, reads, quick, users))

    def _left(self, mode: DeferredCalls) -> Left:
        params, own = self._began.params, self._began.presentation.states()
        states, grads = [own.get(id(p), _NO_STATE) for p in params], [p.grad for p in params]
        check_states(states)
        if self._began.requires_grad != list(map(_requires_grad, params)):
            raise Uncompiled("step() changes requires_grad")
        values, has_shards = list(chain.from_iterable(map(dict.values, states))), self._began.presentation.has_shards
        for p, state, g in zip(params, states, grads, strict=True) if has_shards else ():
            shards.check_sharded(p, [*state.values(), g])
        left = Left(
            list(map(tuple, states)),
            mode.places_of(shards.parts(values, has_shards)),
            mode.places_of(shards.parts(params, has_shards)),
            mode.places_of(shards.parts(grads, has_shards)),
        )
        if any(place is None and g is not None for place, g in zip(left.gradients, grads, strict=True)):
            raise Uncompiled("step() gives a parameter another gradient")
        return left

    def _launched(self, kind: StepKind, mode: DeferredCalls) -> list[Measured]:
        """Launches the updates of a step."""
        if kind.makes_states:
            self.decide()  # a step that a device skips later would leave zeros as states, which the next one reads
        # Before anything is exchanged back: it counts references, and computes numbers of what is presented.
        numbers = self._outliving(kind, mode)
        params, presentation, own = self._began.params, self._began.presentation, self._began.presentation.states()
        # Copies: while updates are launched, these dictionaries have what there was before the step.
        left = [(p, s, dict(s)) for p in params if (s := own.get(id(p))) is not None]
        self._withdraw()
        presentation.restore_words()
        mode.exchange_states(adopted_tensors.exchange_back)
        left_objects.put_back(self._changed(kind), kind, self._began.references.objects or mode.tensors)
        jobs = self._checked_jobs(kind, mode, left)
        presentation.inside = mode.inside()
        self._mode = None  # all is as it was between steps: what a backend raises does not come from placeholders
        measured = self._launching.take(self.optimizer, jobs, self._finite) if jobs else []
        self._keep_objects(kind, mode, {id(p): values for p, _, values in left})
        for t, value in numbers:
            give(t, value)
        ours = bookkeeping(self.optimizer)
        self.traces.presentation, self.traces.structure, ours.as_written = presentation, ours.structure, ""
        presentation.let_go()
        return measured

    def _outliving(self, kind: StepKind, mode: DeferredCalls) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The numbers that outlive the step, with their values."""
        references, marks = self._began.references, bookkeeping(self.optimizer).marks
        found = outliving(kind, mode, references, marks.held() if kind.changed else ())
        if are_marked([mode.tensors[i] for i in references.gradients]):
            self.traces.placeholders.renew()
        self.traces.temporaries = found.temporaries
        return [(mode.tensors[place], mode.value(place)) for place in found.numbers]

    def _checked_jobs(
        self, kind: StepKind, mode: DeferredCalls, left: Sequence[tuple[Any, Any, dict[Any, Any]]]
    ) -> list[Job]:
        """What is launched; if it cannot be, the step goes on with the states that it has `left`."""
        optimizer, seen = self.optimizer, self._began.seen
        if seen is not None and kind.before.keys == kind.left.keys and seen.has({id(p): s for p, s, _ in left}):
            bookkeeping(optimizer).seen = seen
        try:
            jobs = self._jobs(kind, mode)
            _check_gradients(jobs)
            self._launching.validate(optimizer, kind, mode.numbers, self._began.params, jobs)
            # Last: what says that it launches is waited for by the others, so nothing may raise here after it.
            self._agree(LAUNCHES, shards.sent(jobs, self._began.params))
        except (Uncompiled, UnsupportedUpdate):
            step_inventory.changed(optimizer)
            self._began.presentation.enter()
            mode.exchange_states(adopted_tensors.exchange)
            for p, state, values in left:
                state.clear()
                state.update(values)
                optimizer.state[p] = state
            raise
        except BaseException:
            self._mode = None  # all is as it was between steps
            raise
        return jobs

    def _keep_objects(self, kind: StepKind, mode: DeferredCalls, left: Mapping[int, dict[Any, Any]]) -> None:
        """States have the objects that the step has `left` there, and their order."""
        params, has_shards = self._began.params, self._began.presentation.has_shards
        objects = [
            left[id(params[i])][name] if has_shards else mode.tensors[place] for i, name, _, place in kind.changed
        ]
        self.traces.temporaries = left_objects.keep_objects(
            self._changed(kind), kind, objects, self.traces.temporaries, len(self._began.references.holders)
        )
        left_objects.keep_met({i: self.optimizer.state[params[i]] for (i, _), _ in mode.met_states()}, kind, mode)
        if (kind.changed or mode.met) and (seen := step_inventory.of(self.optimizer)) is not None:
            bookkeeping(self.optimizer).seen = seen.with_others()
        if kind.before.keys != kind.left.keys:
            now = self._began.presentation.states()
            left_objects.put_in_order({i: now[id(p)] for i, p in enumerate(params) if id(p) in now}, kind)

    def _changed(self, kind: StepKind) -> left_objects.States:
        """The states that have other objects after the step."""
        return {i: self.optimizer.state[self._began.params[i]] for i, *_ in kind.changed}

    def _jobs(self, kind: StepKind, mode: DeferredCalls) -> list[Job]:
        jobs = []
        for planned in kind.planned:
            group = self.optimizer.param_groups[planned.group]
            for numbers, recording in planned.parts(mode.numbers):
                job = self._job(group, numbers, recording)
                parts = job.by_factors
                jobs += (
                    [job]
                    if len(parts) == 1
                    else [self._job(group, tuple(numbers[i] for i in each), recording.of(each)) for each in parts]
                )
        return jobs

    def _job(self, group: dict[str, Any], numbers: tuple[int, ...], recording: Recording) -> Job:
        lists, params = self.traces.lists, [self._began.params[i] for i in numbers]
        if not step_inventory.are_same(lists.get(numbers, ()), params):
            lists[numbers] = params
        return self._launching.plan(self.optimizer, group, lists[numbers], recording, self._due)


def _may_wait(p: Any) -> bool:
    if not (p.device.type in TRIED and p.dtype in FLOATS):
        return False
    return type(p) in ORDINARY or shards.may_wait(p)


def _other(optimizer: Optimizer) -> Any:
    """A parameter whose values cannot wait, or None."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    return next((p for p in params if not (_may_wait(p) or is_left_alone(p))), None)


def why_not(base: type[Optimizer], optimizer: Optimizer, asked: Asked) -> str:
    """Why the values of an optimizer cannot wait; empty if they can: all tensors are what they hold, or DTensors.

    This is asked before each step.
    """
    if asked.by(base, optimizer):
        return ASKS
    if torch_privates.modes():
        return "a mode of torch's sees each operation"
    p = step_inventory.once(optimizer, "cannot wait", lambda: _other(optimizer))
    return "" if p is None else f"the values of a {type(p).__name__} of {p.dtype} on {p.device} cannot wait"
