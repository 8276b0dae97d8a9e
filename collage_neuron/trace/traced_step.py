"""A step whose operations wait: it runs once, on placeholders, and what it did is launched when it has returned.

The first step of a kind is taken apart into updates of single parameters (`lanes`), which go through the passes and
backends that captured updates go through; a later one that made the same calls launches the same updates with its own
numbers. Where something cannot be launched, all is computed as the step as written would have (`calls.fill`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.presentation import Presentation
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.captured_graph import captured_of
from collage_neuron.passes.capture.recorder import Ref
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.runtime.measured import Measured
from collage_neuron.runtime.plan import Job, job_of
from collage_neuron.settings import Settings
from collage_neuron.states import steady
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.trace.calls import Call, Calls, Uncompiled
from collage_neuron.trace.lanes import Lane, Lanes
from collage_neuron.trace.placeholders import has_value, placeholder, wait

MOST = 4
"""Kinds of steps that an optimizer's traces are compared with; one with more runs as written from then on."""

Take = Callable[[Optimizer, list[Job]], list[Measured]]
"""Launches jobs."""


class Named(NamedTuple):
    """A parameter as a step finds it, or leaves it: its tensors that wait, by name, and the keys of its state."""

    places: dict[str, int]
    keys: tuple[Any, ...]


class Planned(NamedTuple):
    """Parameters that share an update, each with the numbers of the step that are its slots."""

    group: int
    params: list[int]
    captured: Recording
    numbers: list[Callable[[Sequence[float]], Any]]
    more: list[float]
    """Further slots, which are in the calls."""


@dataclass(eq=False)
class Kind:
    """Steps that do the same: how they find the optimizer, what they call, and how they leave it."""

    before: list[Named]
    calls: list[Call]
    after: list[Named]
    planned: list[Planned]


@dataclass(eq=False)
class Traces:
    """What lasts between the traced steps of an optimizer."""

    kinds: list[Kind] = field(default_factory=list)
    misses: int = 0
    why: str = ""
    """Why its last step was not launched."""
    _placeholders: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    @property
    def gives_up(self) -> bool:
        """Returns True once too many steps had to be run as written."""
        return self.misses >= MOST

    def placeholder(self, owner: torch.Tensor) -> torch.Tensor:
        """The placeholder for the value of a tensor, the same in each step."""
        found = self._placeholders.get(id(owner))
        if found is not None and found[0]() is owner and found[1].shape == owner.shape and found[1].stride() == owner.stride():
            return found[1]
        made = placeholder(owner.shape, owner.stride(), torch.float32)
        has_value(made)  # it is exchanged with its owner, which waits
        self._placeholders[id(owner)] = weakref.ref(owner), made
        return made

    def forget(self) -> None:
        """The placeholders have been given memory."""
        self._placeholders.clear()


class TracedStep:
    """One traced step."""

    def __init__(self, optimizer: Optimizer, traces: Traces, take: Take) -> None:
        self.optimizer, self.traces, self._take = optimizer, traces, take
        self.calls: Calls | None = None
        self._before: list[Named] = []

    def placeholder(self, owner: torch.Tensor) -> torch.Tensor:
        """Instead of memory for an fp32 value."""
        return self.traces.placeholder(owner)

    def begin(self, presentation: Presentation) -> Calls:
        """The mode in which the step runs; values are presented."""
        self.presentation = presentation
        tensors: list[torch.Tensor] = []
        self._before = []
        self._requires_grad = {id(p): p.requires_grad for p in presentation.params()}
        for p in presentation.params():
            gradient = presentation.gradients.of.get(id(p))
            names = dict(zip((n.name for n in presentation.outlines[id(p)].values), presentation.owners[id(p)], strict=True))
            if gradient is not None:
                names["grad"] = gradient.wide
            places = {}
            for name, t in names.items():
                places[name] = len(tensors)
                tensors.append(t)
            self._before.append(Named(places, presentation.outlines[id(p)].own))
        tensors += [own for own, _ in presentation.gradients.pairs]
        for t in tensors:
            wait(t)
        earlier = [kind.calls for kind in self.traces.kinds if kind.before == self._before]
        self.calls = Calls(tensors, earlier, self._compute)
        return self.calls

    def compute(self) -> None:
        """Computes what waits."""
        if self.calls is not None:
            self.calls.fill("a closure sees the weights")

    def _compute(self) -> None:
        assert self.calls is not None
        if any(Settings.of(group).unsupported != "twin" for group in self.optimizer.param_groups):
            raise UnsupportedUpdate(f"{type(self.optimizer).__name__} cannot be compiled: {self.calls.why}")
        self.presentation.compute()

    def finish(self) -> list[Measured] | None:
        """Launches what the step did; None if it has to be stored as a step as written."""
        calls = self.calls
        assert calls is not None
        if calls.is_filled:
            self._missed(calls.why)
            return None
        try:
            kind = self._kind(calls)
            return self._launched(kind, calls)
        except (Uncompiled, UnsupportedUpdate) as error:
            calls.fill(str(error))
            self._missed(str(error))
            return None

    def _missed(self, why: str) -> None:
        self.traces.misses += 1
        self.traces.why = why
        self.traces.forget()

    # --- what the step did -------------------------------------------------------------------------------------------

    def _kind(self, calls: Calls) -> Kind:
        after = self._after(calls)
        known = calls.known
        for kind in self.traces.kinds:
            if known is kind.calls and kind.before == self._before and kind.after == after:
                self._check_held(calls, after)
                return kind
        made = calls.made()
        kind = Kind(self._before, made, after, self._planned(made, after, calls))
        self._check_held(calls, after)
        self.traces.kinds.insert(0, kind)
        del self.traces.kinds[MOST:]
        return kind

    def _after(self, calls: Calls) -> list[Named]:
        return [self._left(p, calls) for p in self.presentation.params()]

    def _left(self, p: Any, calls: Calls) -> Named:
        state = dict.get(self.optimizer.state, p, {})
        if not isinstance(state, dict):
            raise Uncompiled("a state is not a dictionary")
        if p.requires_grad != self._requires_grad[id(p)]:
            raise Uncompiled("step() changes requires_grad")
        named = {"param": p, "grad": p.grad, **state}
        places = {name: place for name, x in named.items() if (place := calls.place_of(x)) is not None}
        if p.grad is not None and "grad" not in places:
            raise Uncompiled("step() gives a parameter another gradient")
        return Named(places, tuple(state))

    def _check_held(self, calls: Calls, after: Sequence[Named]) -> None:
        """Raises Uncompiled if a value outlives the step that is not a state."""
        stays = {place for named in after if named for place in named.places.values()}
        tensors = calls.tensors
        first = sum(1 for _ in self.presentation.gradients.pairs) + sum(len(n.places) for n in self._before if n)
        for i in range(first, len(tensors)):
            if i not in stays and sys.getrefcount(tensors[i]) > 2:
                raise Uncompiled("a value of the step is kept by something else than a state")

    def _planned(self, made: list[Call], after: Sequence[Named], calls: Calls) -> list[Planned]:
        lanes = Lanes(calls.tensors, [named.places for named in self._before])
        lanes.add(made)
        groups = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        found: dict[Any, Planned] = {}
        for i, (p, lane) in enumerate(zip(self.presentation.params(), lanes.lanes, strict=True)):
            before, now = self._before[i].places, after[i].places
            if not lane.recorder.ops and before == now:
                continue
            if "grad" not in before:
                raise Uncompiled("step() updates a parameter without a gradient")
            lane.recorder.slots = [calls.numbers[k] for k in lane.numbers]
            captured = captured_of(lane.recorder, lanes.refs(before), lanes.refs(now))
            _check_states(captured, now)
            recording = Recording(captured, lane.recorder.slots, {}, {}, {}, (), frozenset())
            more = lane.recorder.slots[len(lane.numbers):]
            key = groups[id(p)], captured.text, tuple(captured.fresh.items()), tuple(recording.slots), p.dim() > 0, tuple(more)
            planned = found.setdefault(key, Planned(groups[id(p)], [], recording, [], more))
            planned.params.append(i)
            planned.numbers.append(_getter(lane.numbers))
        return list(found.values())

    # --- and launching it --------------------------------------------------------------------------------------------

    def _launched(self, kind: Kind, calls: Calls) -> list[Measured]:
        params = self.presentation.params()
        for t in calls.tensors:
            has_value(t)
        changed = self._changed_objects(kind, calls)
        parts = list(_parts(kind.planned, calls.numbers))
        left = {p: dict(self.optimizer.state[p]) for p in changed}
        self.presentation.restore_words()
        self._put_back(kind, calls, changed)
        groups = self.optimizer.param_groups
        try:
            jobs = [
                job_of(self.optimizer, groups[part.group], [params[i] for i in part.params], replace(part.captured, slots=slots))
                for part, slots in parts
            ]
        except UnsupportedUpdate:
            for p, state in left.items():
                self.optimizer.state[p].update(state)
            self.presentation.enter()
            raise
        measured = self._take(self.optimizer, jobs)
        for p, names in changed.items():
            self._keep_objects(p, names)
        return measured

    def _changed_objects(self, kind: Kind, calls: Calls) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The objects that the step has put into states, by the names of the states."""
        found = {}
        for p, before, after in zip(self.presentation.params(), kind.before, kind.after, strict=True):
            names = {
                k: calls.tensors[i]
                for k, i in after.places.items()
                if before.places.get(k) != i and k not in ("param", "grad")
            }
            if names:
                found[p] = names
        return found

    def _put_back(self, kind: Kind, calls: Calls, changed: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """States have the objects of before the step again, whose words are written."""
        for p, before in zip(self.presentation.params(), kind.before, strict=True):
            for name in changed.get(p, ()):
                if name in before.places:
                    self.optimizer.state[p][name] = calls.tensors[before.places[name]]
                else:
                    del self.optimizer.state[p][name]

    def _keep_objects(self, p: torch.Tensor, names: Mapping[str, torch.Tensor]) -> None:
        """Puts the words of states into the objects that the step has left there."""
        state = self.optimizer.state[p]
        words = {name: state[name].detach() for name in names}  # objects may have traded places
        for name, t in names.items():
            torch_privates.exchange(t, words[name])
            state[name] = t


def _check_states(captured: Any, now: Mapping[str, int]) -> None:
    missing = now.keys() - {"param", "grad", *captured.states}
    if missing or captured.small or captured.shapes or captured.seen_as:
        raise Uncompiled("a state has another shape than its parameter")


def _getter(numbers: Sequence[int]) -> Callable[[Sequence[float]], Any]:
    if len(numbers) < 2:
        return lambda found: tuple(found[i] for i in numbers)
    return itemgetter(*numbers)


def _parts(planned: Sequence[Planned], numbers: Sequence[float]) -> Any:
    """The parameters that share their numbers too, with these."""
    for each in planned:
        by_numbers: dict[Any, list[int]] = {}
        for i, get in zip(each.params, each.numbers, strict=True):
            by_numbers.setdefault(get(numbers), []).append(i)
        for found, params in by_numbers.items():
            yield each._replace(params=params), [*map(float, found), *each.more]


def can_wait(optimizer: Optimizer) -> bool:
    """Returns True if the values of an optimizer can wait: on the CPU, of tensors that are what they hold."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(Settings.of(group).arithmetic != "fp32" for group in optimizer.param_groups):
        return False
    return not torch_privates.innermost_mode() and all(
        p.is_cpu and type(p) in ORDINARY and p.dim() and p.numel() and p.dtype == torch.bfloat16 for p in params
    )
