"""A step whose operations wait: it runs once, on placeholders, and what it did is launched when it has returned.

How it is launched is in `step_end`. Where something cannot be, all is computed as the step as written would have
(`DeferredCalls.fill`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import RunsAsWritten, StepSkipped, UnsupportedUpdate
from collage_neuron.runtime import fallback_warning, wrappers
from collage_neuron.runtime.preconditions import FLOATS, is_left_alone
from collage_neuron.runtime.process_agreement import AS_WRITTEN, RAISES, READS
from collage_neuron.runtime.step_call import Measured
from collage_neuron.settings import Settings
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import Inner, state_of
from collage_neuron.states.sharding import ORDINARY, TRIED, is_sharded
from collage_neuron.states.state_keys import is_value
from collage_neuron.trace import adopted_tensors, shards
from collage_neuron.trace.calls import Uncompiled
from collage_neuron.trace.code_inspection import ASKS, Asked
from collage_neuron.trace.deferred_calls import DeferredCalls
from collage_neuron.trace.escapes import References
from collage_neuron.trace.placeholders import withdraw
from collage_neuron.trace.step_end import Began, Launching, StepEnd
from collage_neuron.trace.step_kinds import (
    Before,
    Placeholders,
    StepKind,
    Traces,
)
from collage_neuron.trace.step_reads import Sources
from collage_neuron.trace.tensor_places import Exchanged
from collage_neuron.trace.torch_errors import is_of_torch, repeated

if TYPE_CHECKING:
    from collage_neuron.eager.presentation import Presentation
    from collage_neuron.passes.ir.update import Recording


_NO_STATE: dict[Any, Any] = {}
_requires_grad, _is_cpu = attrgetter("requires_grad"), attrgetter("is_cpu")


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
        self.optimizer, self.traces, self.launching, self.due = optimizer, traces, launching, due
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
        self.finite: torch.Tensor | None = None
        """The mask that is true if all gradients are finite, as long as nobody has waited for it."""
        self._is_forbidden = self._reads = False
        """True if a filter of `warnings` makes it an error to run as written."""
        self.of_part = wrappers.shape_of_part(optimizer, step_inventory.of(optimizer))
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
        self.finite = None if finite.is_cpu or not (is_steady and all_skip) else finite
        return self.finite is not None

    def decide(self) -> None:
        """Waits for that, if nobody has yet: something has to be known before the step is launched."""
        finite, self.finite = self.finite, None
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
        known = presentation.inside = presentation.inside if are_same else ()  # it may begin again (`go_on`)
        on_host = all(map(_is_cpu, params))
        # Elsewhere operations run at once, and what is large would be there for all parameters together.
        may_read_ahead = on_host or all(p.device.type == "xla" for p in params)
        may_read_ahead = may_read_ahead and self.of_part is None and not presentation.has_shards
        sources = Sources(
            self._copy_of,
            self._copy_into if may_read_ahead else None,
            self._reading if presentation.has_shards else nullcontext,
            self.decide,
        )
        self._mode = DeferredCalls(tensors, self._compute, self._state_of, sources, same, cones, spare, steady, known)
        self._mode.may_send = presentation.has_shards
        if not presentation.has_shards and (not is_steady or kinds[0].fills):
            self._mode.see_made()
        self._meet_states(self._mode, params, on_host, is_like_last)
        return self._mode

    def _meet_states(self, mode: DeferredCalls, params: list[Any], on_host: bool, is_like_last: bool) -> None:
        """Makes states wait from the beginning that are not in words."""
        kinds, as_made = self.traces.kinds, bookkeeping(self.optimizer).as_made
        for p in params if not (on_host and kinds) else ():
            states = dict.get(self.optimizer.state, p, _NO_STATE)
            mode.adopted.meet_states(p, states, as_made.get(p, ()) if as_made else (), only_narrow=on_host)
        if on_host and kinds and kinds[0].met:
            met = [(i, name) for i, name in kinds[0].met if i < len(params)]
            states = [dict.get(self.optimizer.state, params[i], _NO_STATE).get(name) for i, name in met]
            if not (self._is_planned and is_like_last and mode.adopted.meet_all(met, states)):
                mode.adopted.meet_again(x for x in states if isinstance(x, torch.Tensor))
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
        dtype, are_parts = torch.get_default_dtype(), self.of_part is not None
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
        if not self.has_parts:
            return presentation.copies().of(x)
        if self.of_part is not None or not self._reads:
            return shards.no_copy(x)
        return presentation.copies().of(next(t for t in objects if torch_privates.part(t) is x))

    def _copy_into(self, owners: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        self._began.presentation.copies().fill(owners, into)

    @contextmanager
    def _reading(self, reads: Sequence[tuple[int, int]]) -> Iterator[None]:
        """A context in which values over shards are read, as of all processes: these have to read the same."""
        assert self._mode is not None
        self.agree(READS, (reads, [call.func.__name__ for call in self._mode.calls]))
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
            self._unused = self._unused or self._mode.places.let_go(len(self._began.references.holders))
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
        self._has_raised, self.finite = True, None
        mode = None if self._has_agreed else self._mode
        if mode is not None and not self._is_forbidden and (mode.failed is not None or is_of_torch(error)):
            self.may_repeat = self.may_run_as_written
            self.traces.missed(f"with values that wait, step() raises {type(error).__name__}: {error}")
        if isinstance(error, Exception) and not self.may_repeat:  # the others wait for what this process says
            with suppress(Exception):
                self.agree(RAISES)
        self._has_agreed = True

    def check_as_written(self, why: str) -> None:
        """Raises UnsupportedUpdate if the step may not run as written; `why` says why it cannot be launched."""
        if not self.may_run_as_written:
            if not self._has_raised:
                self.traces.missed(why)
            said = why if self.of_part is None else shards.without_whole(why, self.of_part)
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
        if self._is_forbidden or self.of_part is not None:
            return False
        return all(Settings.of(group).arithmetic == "fp32" for group in self.optimizer.param_groups)

    @property
    def has_parts(self) -> bool:
        """Returns True if the update of a parameter may be that of a part."""
        return self._began.presentation.has_shards or self.of_part is not None

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
        self.agree(AS_WRITTEN)
        self.traces.computed()
        self._began.presentation.compute()

    def agree(self, planned: int, sent: object = None) -> None:
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
        self.withdraw()
        if self._mode is not None:
            self._mode.adopted.undo()

    def withdraw(self) -> None:
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
        if mode.adopted.has_any:
            mode.put_originals(filter(None, (dict.get(self.optimizer.state, p) for p in self._began.params)))
        if not mode.is_filled:
            end = StepEnd(self, self._began, mode)
            try:
                measured = end.launch()
            except Exchanged:  # nobody knows what is inside which object: it cannot be computed either
                raise
            except (Uncompiled, UnsupportedUpdate) as error:
                mode.fill(str(error))
            finally:
                if end.is_over:
                    self._mode = None
        if measured is None:
            mode.settle()
            self.traces.missed(mode.why)
        self._mode = None  # it refers to this object: memory would wait for the collector
        return measured


def _may_wait(p: Any) -> bool:
    if not (p.device.type in TRIED and p.dtype in FLOATS):
        return False
    return type(p) in ORDINARY or shards.may_wait(p)


def _other(optimizer: Optimizer) -> Any:
    """A parameter, or a state in words, whose values cannot wait, or None."""
    params = [p for group in optimizer.param_groups for p in group["params"] if not is_left_alone(p)]
    found = [p for p in params if not _may_wait(p)]
    states = [(p, state) for p in params if isinstance(state := dict.get(optimizer.state, p), dict)]
    values = (x for p, state in states for x in state.values() if is_value(x, p))
    return next(chain(found, (x for x in values if not (type(x) in ORDINARY or is_sharded(x)))), None)


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
