"""What lasts between the traced steps of an optimizer: the kinds of steps it takes, and their placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from keyword import iskeyword
from math import isfinite
from operator import itemgetter
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.numerics.formats import is_component
from collage_neuron.passes.analysis.state_roles import pattern, roles_of
from collage_neuron.passes.functionalize.captured_graph import captured_of
from collage_neuron.passes.functionalize.recorded_ops import Recorder, Ref
from collage_neuron.passes.ir.update import Captured, Recording
from collage_neuron.states import step_inventory
from collage_neuron.states.sharding import is_sharded
from collage_neuron.trace import adopted_tensors
from collage_neuron.trace.calls import Call, Quick, Uncompiled
from collage_neuron.trace.materialize import Cones
from collage_neuron.trace.partition import Partition, Read
from collage_neuron.trace.placeholders import give, placeholder, present, withdraw

if TYPE_CHECKING:
    from collage_neuron.eager.presentation import Presentation
    from collage_neuron.trace.code_inspection import Asked
    from collage_neuron.trace.deferred_calls import DeferredCalls

MOST = 4
"""Kinds of steps that are known; after as many steps that could not be launched, an optimizer's run as written."""

NEW = 16
"""After more steps of kinds that were not known than others have paid for, an optimizer's run as written too."""

PAY = 64
"""So many steps of kinds that are known save the time that a new kind takes, beside steps as written."""

MOST_ROLES = 1024
"""Patterns of the numbers of an update whose roles are known, before all are forgotten."""

Named = dict[str, int]
"""The places of the tensors of a parameter that wait: of itself, its gradient and its states, by name."""


class Left(NamedTuple):
    """How a step leaves parameters: the keys of their states, and the places of all values there, and of gradients."""

    keys: list[tuple[Any, ...]]
    states: list[int | None]
    params: list[int | None]
    gradients: list[int | None]

    def named(self) -> list[Named]:
        """The tensors of each parameter."""
        states, found = iter(self.states), []
        for keys, param, gradient in zip(self.keys, self.params, self.gradients, strict=True):
            places = {"param": param, "grad": gradient, **{key: next(states) for key in keys}}
            found.append({name: place for name, place in places.items() if place is not None})
        return found

    def places(self) -> set[int | None]:
        """The places of what outlives the step."""
        return {*self.states, *self.params, *self.gradients}


class Planned(NamedTuple):
    """Parameters that share an update, each with the numbers of the step that are its slots."""

    group: int
    params: list[int]
    recording: Recording
    numbers: list[Callable[[Sequence[float]], Any]]
    more: list[float]
    """Further slots: numbers that the calls have."""
    roles: dict[object, object]
    """Those of its states, by the `pattern` of its numbers."""

    def followed_by(self, following: Mapping[str, Recording]) -> Planned:
        """Adds the recording of the step after it, which may show what states are for."""
        found = following.get(self.recording.captured.text)
        return self if found is None else self._replace(recording=replace(self.recording, following=found))

    def parts(self, numbers: Sequence[float]) -> Iterator[tuple[tuple[int, ...], Recording]]:
        """Yields parameters that can be launched together, with their recording.

        Formats may depend on the signs and sizes of numbers (`pattern`): where roles are different, so are the parts.
        """
        rows = [[*get(numbers), *self.more] for get in self.numbers]
        bits = Struct(f"{len(rows[0])}d")  # as bits: NaN does not equal itself, and 0.0 equals -0.0
        if len({bits.pack(*row) for row in rows}) == 1:
            yield tuple(self.params), replace(self.recording, slots=rows[0])
            return
        # Few numbers are others for each parameter, and a pattern costs some microseconds.
        different = [column for column in zip(*rows, strict=True) if len({*column}) > 1]
        alike: dict[object, list[int]] = {}
        for i in range(len(rows)):
            alike.setdefault(pattern([column[i] for column in different]), []).append(i)
        whole, parts = replace(self.recording, rows=rows), dict[object, list[int]]()
        for places in alike.values():
            parts.setdefault(self._roles(rows[places[0]]) if len(alike) > 1 else None, []).extend(places)
        for places in map(sorted, parts.values()):
            yield tuple(self.params[i] for i in places), whole.of(places)

    def _roles(self, slots: Sequence[float]) -> object:
        """The roles of its states with these numbers, which cost a thousand times as much as their pattern."""
        key, own = pattern(slots), self.recording
        if not all(map(isfinite, slots)):
            return key  # which may be rejected, and is not launched with others
        if key not in self.roles:
            if len(self.roles) >= MOST_ROLES:
                self.roles.clear()
            self.roles[key] = frozenset(roles_of(own.captured, slots, own.following).items())
        return self.roles[key]


class Before(NamedTuple):
    """How a step finds parameters."""

    named: list[Named]
    keys: list[tuple[Any, ...]]
    """Those of their states."""
    groups: list[int]
    """The groups that they are in."""
    stored: list[torch.dtype]
    """Their dtypes between steps."""
    layouts: list[tuple[torch.Size, tuple[int, ...]]]
    """The shapes and strides of what waits, by places: code may ask results of operations for theirs."""
    dtype: torch.dtype
    """What torch makes of numbers."""
    are_parts: bool
    """True if parameters are parts of which nobody knows the others: sums of them are not launched."""


@dataclass(frozen=True, eq=False)
class StepKind:
    """Steps that do the same: how they find the parameters, what they call, and how they leave them."""

    before: Before
    named: list[Named]
    """What waits before, with the states that were met later."""
    cones: Cones
    left: Left
    after: list[Named]
    """The same by names."""
    planned: list[Planned]
    reads: list[Read]
    """Values of several parameters, which are further numbers of the step."""
    quick: list[tuple[Quick | None, Quick | None]]
    """How each call is looked at: as an operation, and as a method."""
    users: list[int]
    """How often something in C++ refers to each tensor afterwards."""
    validated: set[Any] = field(default_factory=set)
    """The updates of it that were validated, with their backends."""

    @property
    def calls(self) -> list[Call]:
        """What they call."""
        return self.cones.calls

    @cached_property
    def fills(self) -> bool:
        """Returns True if a call makes a tensor of nothing."""
        return any(call.func is torch.ops.aten.full.default for call in self.calls)

    @cached_property
    def met(self) -> list[adopted_tensors.Name]:
        """The states that are not in words, and met values that wait."""
        return [call.args[0][1] for call in self.calls if call.func is adopted_tensors.state]

    @cached_property
    def makes_nothing(self) -> bool:
        """Returns True if all calls are in place."""
        return not any(call.makes for call in self.calls)

    @cached_property
    def makes_states(self) -> bool:
        """Returns True if there are states afterwards that were not there before."""
        return self.before.keys != self.left.keys or any(before is None for *_, before, _ in self.changed)

    @cached_property
    def changed(self) -> list[tuple[int, str, int | None, int]]:
        """The states that have other objects afterwards: parameter, name, the place before, and the one after."""
        return [
            (i, name, before.get(name), place)
            for i, (before, after) in enumerate(zip(self.named, self.after, strict=True))
            for name, place in after.items()
            if before.get(name) != place and name not in ("param", "grad")
        ]


def check_states(states: Iterable[object]) -> None:
    """Raises Uncompiled for a state that is not a dictionary."""
    for state in states:
        if type(state) is not dict:
            raise Uncompiled(
                f"step() keeps an object of type {type(state).__name__} as optimizer.state[p]; keep a dictionary"
            )


def with_states(named: Sequence[Named], calls: Sequence[Call]) -> list[Named]:
    """What waits before a step, with the states that calls have met later."""
    found = list(map(dict, named))
    for call in calls:
        if call.func is adopted_tensors.state:
            number, name = call.args[0][1]
            found[number][name] = call.first
    return found


def planned_of(
    before: Before, named: Sequence[Named], left: Left, mode: DeferredCalls
) -> tuple[list[Planned], list[Read]]:
    """The updates of single parameters that the calls are, and the values that these have of several parameters.

    Raises:
        Uncompiled, or UnsupportedUpdate: the calls are more than that.
    """
    tensors, lanes = mode.tensors, Partition(mode.tensors, named, mode.calls)
    afterwards, first, found = left.named(), len(mode.numbers), dict[Any, Planned]()
    changing = list(_changing(lanes, named, left, tensors))
    # Values are read when all that they are for is known: over shards, processes have to read the same.
    new = dict.fromkeys(x for _, _, positions in changing for x in positions if isinstance(x, Read))
    mode.reads.add_numbers(new)
    reads = dict(zip(new, range(first, len(mode.numbers)), strict=True))
    for i, recorder, positions in changing:
        own, now, group, dtype = named[i], afterwards[i], before.groups[i], before.stored[i]
        at = [reads[x] if isinstance(x, Read) else x for x in positions]
        slots = recorder.slots = [mode.numbers[k] for k in at]
        always = {name: own[name] for name in ("param", "grad")}  # states that are new come after these too
        captured = captured_of(recorder, lanes.refs(always | own), lanes.refs(now))
        _check_shapes(captured, now)
        more = slots[len(at) :]
        has_rows = bool(tensors[own["param"]].dim())  # without a row there are no formats in blocks
        # Further slots are numbers that calls have: told apart by their bits, since 0.0 equals -0.0.
        key = group, dtype, captured.text, tuple(captured.fresh.items()), has_rows, bits_of(more)
        if key not in found:
            found[key] = Planned(group, [], Recording(captured, slots), [], more, {})
        found[key].params.append(i)
        found[key].numbers.append(_getter(at))
    return list(found.values()), list(reads)


def _changing(
    lanes: Partition, named: Sequence[Named], left: Left, tensors: Sequence[torch.Tensor]
) -> Iterator[tuple[int, Recorder, list[int | Read]]]:
    """The parameters that a step changes, or their states: what it does to each, and what the numbers in that are."""
    for i, (lane, own, now, keys) in enumerate(zip(lanes.lanes, named, left.named(), left.keys, strict=True)):
        lanes.keep(list(now.values()), i)
        recorder, positions = lane.recorder(lanes.refs(own | now).values())
        if not recorder.ops and own == now:
            continue
        if taken := {"param", "grad"}.intersection(keys) or {key for key in keys if is_component(key, keys)}:
            raise Uncompiled(f"step() has a state called {min(taken)!r}, a name that something else has; rename it")
        if "grad" not in own:
            raise Uncompiled("step() updates a parameter without a gradient")
        if gone := own.keys() - now.keys() - {"grad"}:
            raise Uncompiled(f"step() deletes optimizer.state[p][{min(gone)!r}]; set it to zeros instead")
        _check_names(lanes.refs(now))
        if any(tensors[place].dtype != torch.float32 for place in now.values()):
            raise Uncompiled("a state is not fp32")
        yield i, recorder, positions


def _check_names(now: Mapping[Any, Ref]) -> None:
    """Raises Uncompiled for states that are no values of their own, or whose names are none of values."""
    for name in now:
        if not (isinstance(name, str) and name.isidentifier()) or iskeyword(name) or _INPUTS.fullmatch(name):
            raise Uncompiled(
                f"step() has a state called {name!r}, which is no name of a value, or one of ours; rename it"
            )
    if len({ref.storage for ref in now.values()}) < len(now):
        raise Uncompiled("a state shares the memory of its parameter, its gradient or another state; clone() it")


_INPUTS = re.compile(r"[cs]\d+|self")
"""What the numbers of an update are called in its graph, and the first argument of torch's code for it."""


def _check_shapes(captured: Captured, now: Mapping[str, int]) -> None:
    if others := now.keys() - {"param", "grad", *captured.states, *captured.small}:
        raise Uncompiled(f"step() keeps {', '.join(others)}, which is no state of an update")


def bits_of(numbers: Sequence[float]) -> bytes:
    """What tells numbers apart: 0.0 equals -0.0."""
    return pack(f"{len(numbers)}d", *numbers)


def _getter(numbers: Sequence[int]) -> Callable[[Sequence[float]], Any]:
    return itemgetter(*numbers) if len(numbers) > 1 else lambda found: tuple(found[i] for i in numbers)


class Placeholders:
    """The placeholders of parameters, states and gradients; those of gradients are the same in each step."""

    def __init__(self) -> None:
        # No weak references: `torch.utils.swap_tensors` rejects tensors that have some.
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._last: tuple[Any, Callable[..., Any], Any] = (), list, []
        """The parameters with a gradient in the last step, what says that theirs are alike, and the placeholders."""

    def renew(self) -> None:
        """Gradients have other placeholders from now on."""
        self._gradients.clear()
        self._last = (), list, []

    def value(self, owner: torch.Tensor) -> torch.Tensor:
        """One for a parameter or a state."""
        return _placeholder(owner)

    def present(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Called when some have been exchanged with what is inside objects, which come first."""
        present(pairs)

    def withdraw(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Called before they are exchanged back."""
        withdraw(pairs)

    def give(self, t: torch.Tensor, value: torch.Tensor) -> None:
        """Gives one its value."""
        give(t, value)

    def gradients(self, params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One for the gradient of each parameter, in two objects."""
        grads: list[Any] = [p.grad for p in params]
        found: list[tuple[torch.Tensor, torch.Tensor]]
        params_before, is_alike, found = self._last
        if not (step_inventory.are_same(params_before, params) and is_alike(*grads)):
            found = list(map(self._gradient, params, grads))
            here = set(map(id, params))  # others may have left the optimizer: they are not kept alive
            self._gradients = {key: known for key, known in self._gradients.items() if key in here}
            self._last = params, torch_privates.guard(grads) if grads else list, found  # `list()` is false
        return found

    def _gradient(self, p: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._gradients.get(id(p))
        if is_sharded(p):
            return _placeholder(grad), _placeholder(grad)
        if found is None or found[0] is not p or not _lies_like(found[1], grad):
            found = self._gradients[id(p)] = p, _placeholder(grad), _placeholder(grad)
        return found[1], found[2]


def _placeholder(like: torch.Tensor) -> torch.Tensor:
    part = torch_privates.part(like)
    made = placeholder(part.shape, part.stride(), torch.float32, part.device)
    return torch_privates.sharded_like(made, like) if is_sharded(like) else made


def _lies_like(t: torch.Tensor, owner: torch.Tensor) -> bool:
    return t.shape == owner.shape and t.stride() == owner.stride()


@dataclass(eq=False)
class Traces:
    """What lasts between the traced steps of an optimizer."""

    asked: Asked
    """Whether functions ask for exact types."""
    kinds: list[StepKind] = field(default_factory=list)
    """The last one first."""
    new: float = 0.0
    """Steps of kinds that were not known, but for those that others have paid for."""
    misses: int = 0
    """Steps that could not be launched."""
    why: str = ""
    """Why the last of them could not."""
    placeholders: Placeholders = field(default_factory=Placeholders)
    temporaries: list[torch.Tensor] = field(default_factory=list)
    """The placeholders that the calls of the last step have made, if the next one can have them."""
    before: Before | None = None
    """How the last step found the parameters."""
    presentation: Presentation | None = None
    """That of the last step, with the states that it has left."""
    structure: step_inventory.Structure | None = None
    """What the last step found."""
    foreseen: object = ()
    """What the last step had found of which a copy was stepped (`dry_run`): once, though it may not be launched."""
    lists: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    """Of its parameters those that are launched together, by their numbers: the same list in each step."""

    @property
    def gives_up(self) -> bool:
        """Returns True once too many steps had to be run as written, or to be compiled."""
        return self.misses >= MOST or self.new > NEW

    def missed(self, why: str) -> None:
        """A step could not be launched."""
        self.misses, self.why = self.misses + 1, why

    def computed(self) -> None:
        """The placeholders have got values: the next step has other ones."""
        self.placeholders, self.presentation, self.temporaries = Placeholders(), None, []

    def add(self, kind: StepKind) -> StepKind:
        """The kind of the last step."""
        self.foreseen = ()
        if kind in self.kinds:
            self.kinds.remove(kind)
            self.new = max(0.0, self.new - 1 / PAY)
        else:
            self.new += 1
        if self.new > NEW:
            self.why = "its steps do something else too often"
        self.kinds.insert(0, kind)
        del self.kinds[MOST:]
        return kind
