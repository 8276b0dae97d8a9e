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
from itertools import chain
from operator import attrgetter, itemgetter
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
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.names import is_component
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.trace.calls import Call, Calls, Expected, Uncompiled
from collage_neuron.trace.lanes import Lanes
from collage_neuron.trace.placeholders import has_value, placeholder, wait

MOST = 4
"""Kinds of steps that an optimizer's traces are compared with; one with more runs as written from then on."""

REPLACED = 6
"""References to a state that a step has replaced, if nobody else has one: ours."""

Take = Callable[[Optimizer, list[Job]], list[Measured]]
"""Launches jobs."""


Named = dict[str, int]
"""The tensors of a parameter that wait, by name."""


class Left(NamedTuple):
    """How a step leaves parameters: the keys of their states, and the places of all values there, and of gradients."""

    keys: list[tuple[Any, ...]]
    states: list[int | None]
    params: list[int | None]
    gradients: list[int | None]

    def named(self) -> list[Named]:
        """The tensors of each parameter."""
        states = iter(self.states)
        found = []
        for keys, param, gradient in zip(self.keys, self.params, self.gradients, strict=True):
            places = {"param": param, "grad": gradient, **{key: next(states) for key in keys}}
            found.append({name: place for name, place in places.items() if place is not None})
        return found


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
    left: Left
    after: list[Named]
    """The same by names."""
    planned: list[Planned]
    quick: list[Expected]
    keys: list[tuple[Any, ...]]
    """Those of the states before it."""
    groups: list[int]
    """Those that the parameters are in."""


class Placeholders:
    """The placeholders of one optimizer, the same in each step."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._gradients: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, torch.Tensor]] = {}

    def value(self, owner: torch.Tensor) -> torch.Tensor:
        """One for a parameter or a state."""
        found = self._values.get(id(owner))
        if found is None or found[0]() is not owner or not _lies_like(found[1], owner):
            found = self._values[id(owner)] = weakref.ref(owner), _placeholder(owner)
        return found[1]

    def gradient(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One for its gradient, in two objects."""
        found = self._gradients.get(id(p))
        assert p.grad is not None
        if found is None or found[0]() is not p or not _lies_like(found[1], p.grad):
            made = _placeholder(p.grad)
            found = self._gradients[id(p)] = weakref.ref(p), made, made.detach()
        return found[1], found[2]


def _placeholder(like: torch.Tensor) -> torch.Tensor:
    made = placeholder(like.shape, like.stride(), torch.float32)
    has_value(made)  # an object that it is exchanged with is what waits
    return made


def _lies_like(t: torch.Tensor, owner: torch.Tensor) -> bool:
    return t.shape == owner.shape and t.stride() == owner.stride()


@dataclass(eq=False)
class Traces:
    """What lasts between the traced steps of an optimizer."""

    kinds: list[Kind] = field(default_factory=list)
    """The last one first."""
    misses: int = 0
    why: str = ""
    """Why its last step was not launched."""
    placeholders: Placeholders = field(default_factory=Placeholders)
    temporaries: list[torch.Tensor] = field(default_factory=list)
    """The placeholders that the calls of the last step have made, if the next one can have them."""
    presentation: Presentation | None = None
    """That of the last step, without states."""
    structure: steady.Structure | None = None
    """What the last step found."""
    lists: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    """Of its parameters those that are launched together, by their numbers: the same list in each step."""

    @property
    def gives_up(self) -> bool:
        """Returns True once too many steps had to be run as written."""
        return self.misses >= MOST

    def forget(self) -> None:
        """The placeholders have been given memory."""
        self.placeholders, self.presentation, self.temporaries = Placeholders(), None, []


class TracedStep:
    """One traced step."""

    def __init__(self, optimizer: Optimizer, traces: Traces, take: Take) -> None:
        self.optimizer, self.traces, self._take = optimizer, traces, take
        self.calls: Calls | None = None
        self._before: list[Named] = []
        self._classes: list[type] = []
        self._made: list[torch.Tensor] = []
        self._seen: steady.Seen | None = None

    @property
    def given_up(self) -> str:
        """Why no step of the optimizer is traced any more; empty if the next one is."""
        if not self.traces.gives_up:
            return ""
        return f"{type(self.optimizer).__name__} cannot be compiled: {self.traces.why}"

    @property
    def waiting(self) -> Placeholders:
        """What makes placeholders instead of memory for fp32 values."""
        return self.traces.placeholders

    def planned(self, seen: steady.Seen) -> tuple[Presentation, set[int]] | None:
        """What an earlier step has planned, with the ids of its tensors, if what this one has `seen` is the same."""
        kept = self.traces.presentation
        if kept is None or seen.structure is not self.traces.structure or bookkeeping(self.optimizer).pins:
            self.traces.lists.clear()
            return None
        return kept, kept.again(dict(zip(map(id, kept.params()), seen.state_of(kept.params()), strict=True)))

    def begin(self, presentation: Presentation, seen: steady.Seen | None) -> Calls:
        """The mode in which the step runs; values are presented."""
        self.presentation, self._seen = presentation, seen
        tensors: list[torch.Tensor] = []
        self._params = presentation.params()
        self._requires_grad = list(map(_requires_grad, self._params))
        numbers = {id(group): i for i, group in enumerate(self.optimizer.param_groups)}
        self._groups = [numbers[id(group)] for _, group in presentation.groups.values()]
        for p in self._params:
            first, gradient = len(tensors), presentation.gradients.of.get(id(p))
            tensors += presentation.owners[id(p)]
            places = dict(zip(presentation.outlines[id(p)].names, range(first, len(tensors)), strict=True))
            if gradient is not None:
                places["grad"] = len(tensors)
                tensors.append(gradient.wide)
            self._before.append(places)
        tensors += [own for own, _ in presentation.gradients.pairs]
        self._classes = list(map(type, tensors))
        self._wide = [g.wide for g in presentation.gradients.of.values()]
        self._holders = list(map(sys.getrefcount, self._wide))
        for t in tensors:
            wait(t)
        kinds, spare = self.traces.kinds, self.traces.temporaries
        self.traces.temporaries = []
        earlier = [kind.calls for kind in kinds if kind.before == self._before]
        is_last = bool(earlier) and earlier[0] is kinds[0].calls
        self.calls = Calls(tensors, earlier, spare if is_last else [], kinds[0].quick if is_last else [], self._compute)
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

    def end(self) -> None:
        """All tensors have the classes that they had."""
        if self.calls is not None:
            for t, kind in zip(self.calls.tensors, self._classes, strict=False):
                t.__class__ = kind

    def finish(self) -> list[Measured] | None:
        """Launches what the step did; None if it has to be stored as a step as written."""
        calls = self.calls
        assert calls is not None
        if not calls.is_filled:
            try:
                return self._launched(self._kind(calls), calls)
            except (Uncompiled, UnsupportedUpdate) as error:
                calls.fill(str(error))
        self.traces.misses += 1
        self.traces.why = calls.why
        self.traces.forget()
        return None

    # --- what the step did -------------------------------------------------------------------------------------------

    def _kind(self, calls: Calls) -> Kind:
        left, known, kinds = self._left(calls), calls.known, self.traces.kinds
        for i, kind in enumerate(kinds):
            if known is kind.calls and (kind.before, kind.left, kind.groups) == (self._before, left, self._groups):
                kinds.insert(0, kinds.pop(i))
                return kind
        made, after = calls.made(), left.named()
        keys = [self.presentation.outlines[id(p)].own for p in self._params]
        planned = self._planned(made, after, calls)
        kind = Kind(self._before, made, left, after, planned, list(map(Expected.of, made)), keys, self._groups)
        kinds.insert(0, kind)
        del kinds[MOST:]
        return kind

    def _left(self, calls: Calls) -> Left:
        params, states = self._params, [dict.get(self.optimizer.state, p, _NO_STATE) for p in self._params]
        if not {dict}.issuperset(map(type, states)):
            raise Uncompiled("a state is not a dictionary")
        if self._requires_grad != list(map(_requires_grad, params)):
            raise Uncompiled("step() changes requires_grad")
        grads = [p.grad for p in params]
        left = Left(
            list(map(tuple, states)),
            calls.places_of(chain.from_iterable(map(dict.values, states))),
            calls.places_of(params),
            calls.places_of(grads),
        )
        if any(place is None and g is not None for place, g in zip(left.gradients, grads, strict=True)):
            raise Uncompiled("step() gives a parameter another gradient")
        return left

    def _check_held(self, kind: Kind, calls: Calls) -> None:
        """Raises Uncompiled if a value outlives the step that is not a state."""
        first = len(self._classes)
        made = calls.let_go(first)
        stays = {*kind.left.states, *kind.left.params, *kind.left.gradients}
        for i, count in enumerate(map(sys.getrefcount, made), first):
            if count > 2 and i not in stays:  # that of the list, and of the argument
                calls.tensors += made
                raise Uncompiled("a value of the step is kept by something else than a state")
        gone = {
            name for before, after in zip(kind.before, kind.after, strict=True) for name in before.keys() - after.keys()
        }
        if gone - {"grad"}:
            calls.tensors += made
            raise Uncompiled("step() deletes a state")
        replaced = {
            calls.tensors[i]
            for b, a in zip(kind.before, kind.after, strict=True)
            for name, i in b.items()
            if a.get(name) != i and i not in stays and name not in ("param", "grad")
        }
        if any(map(int.__gt__, map(sys.getrefcount, self._wide), self._holders)) or any(
            count > REPLACED for count in map(sys.getrefcount, replaced)
        ):
            calls.tensors += made
            raise Uncompiled("step() keeps a gradient, or a state that it has replaced")
        self._made = made
        if all(place is None or place < first for place in stays):
            self.traces.temporaries = made

    def _planned(self, made: list[Call], after: Sequence[Named], calls: Calls) -> list[Planned]:
        """The updates of single parameters that the calls are."""
        lanes = Lanes(calls.tensors, self._before)
        lanes.add(made)
        found: dict[Any, Planned] = {}
        for i, (p, lane) in enumerate(zip(self._params, lanes.lanes, strict=True)):
            before, now = self._before[i], after[i]
            if not lane.recorder.ops and before == now:
                continue
            if "grad" not in before:
                raise Uncompiled("step() updates a parameter without a gradient")
            _check_names(dict.get(self.optimizer.state, p, _NO_STATE), lanes.refs(now))
            lane.recorder.slots = [calls.numbers[k] for k in lane.numbers]
            captured = captured_of(lane.recorder, lanes.refs(before), lanes.refs(now))
            _check_states(captured, now)
            recording = Recording(captured, lane.recorder.slots, {}, {}, {}, (), frozenset())
            more = lane.recorder.slots[len(lane.numbers) :]
            key = (
                self._groups[i],
                captured.text,
                tuple(captured.fresh.items()),
                tuple(recording.slots),
                p.dim() > 0,
                tuple(more),
            )
            planned = found.setdefault(key, Planned(self._groups[i], [], recording, [], more))
            planned.params.append(i)
            planned.numbers.append(_getter(lane.numbers))
        return list(found.values())

    # --- and launching it --------------------------------------------------------------------------------------------

    def _launched(self, kind: Kind, calls: Calls) -> list[Measured]:
        changed = self._changed_objects(kind, calls)
        self._check_held(kind, calls)
        left = [
            (p, state, dict(state)) for p in self._params if (state := dict.get(self.optimizer.state, p)) is not None
        ]
        self.end()
        self.presentation.restore_words()
        self._put_back(kind, calls, changed)
        if self._seen is not None and kind.keys == kind.left.keys and not changed:
            bookkeeping(self.optimizer).seen = self._seen
        try:
            jobs = [self._job(*part) for part in _parts(kind.planned, calls.numbers)]
        except UnsupportedUpdate:
            steady.changed(self.optimizer)
            self.presentation.enter()
            for p, state, values in left:
                state.clear()
                state.update(values)
                self.optimizer.state[p] = state
            calls.tensors += self._made
            raise
        measured = self._take(self.optimizer, jobs) if jobs else []
        for p, names in changed.items():
            self._keep_objects(p, names)
        self.calls, self._made = None, []  # the mode refers to this object: memory would wait for the collector
        self.traces.presentation, self.traces.structure = self.presentation, bookkeeping(self.optimizer).structure
        self.presentation.let_go()
        return measured

    def _job(self, part: Planned, slots: list[float]) -> Job:
        group, numbers, lists = self.optimizer.param_groups[part.group], tuple(part.params), self.traces.lists
        if numbers not in lists:
            lists[numbers] = [self._params[i] for i in numbers]
        return job_of(self.optimizer, group, lists[numbers], replace(part.captured, slots=slots))

    def _changed_objects(self, kind: Kind, calls: Calls) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The objects that the step has put into states, by the names of the states."""
        found = {}
        for p, before, after in zip(self._params, kind.before, kind.after, strict=True):
            names = {k: calls.tensors[i] for k, i in after.items() if before.get(k) != i and k not in ("param", "grad")}
            if names:
                found[p] = names
        return found

    def _put_back(self, kind: Kind, calls: Calls, changed: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """States have the objects of before the step again, whose words are written."""
        for p, before in zip(self._params, kind.before, strict=True):
            for name in changed.get(p, ()):
                if name in before:
                    self.optimizer.state[p][name] = calls.tensors[before[name]]
                else:
                    del self.optimizer.state[p][name]

    def _keep_objects(self, p: torch.Tensor, names: Mapping[str, torch.Tensor]) -> None:
        """Puts the words of states into the objects that the step has left there."""
        state = self.optimizer.state[p]
        words = {name: state[name].detach() for name in names}  # objects may have traded places
        for name, t in names.items():
            has_value(t)
            torch_privates.exchange(t, words[name])
            state[name] = t


_NO_STATE: dict[Any, Any] = {}
_requires_grad = attrgetter("requires_grad")


def _check_names(state: Mapping[Any, Any], now: Mapping[Any, Ref]) -> None:
    """Raises Uncompiled for states that are no values of their own, or whose names are none of values."""
    for name in now:
        if not (isinstance(name, str) and name.isidentifier()) or is_component(name, state):
            raise Uncompiled(f"a state is called {name!r}")
    if len({ref.storage for ref in now.values()}) < len(now) or {"param", "grad"} & state.keys():
        raise Uncompiled("a state shares the memory of its parameter, its gradient or another state")


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
