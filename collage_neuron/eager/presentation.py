"""Presents fp32 values: the objects of parameters and states stay, and exchange what is inside them.

While they are presented, the object of a parameter, or of a state in words, has an fp32 tensor inside, and its `shell`
has the first word. So identities, dictionary keys, hooks and what autograd knows of a parameter stay. What the step
keeps (`p.data` in a list) refers to the fp32 memory, which is presented in the next step too, as long as something
does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.codec import SMALL, Alike, Conversions, Copies, Lookup, Value, by_conversion
from collage_neuron.eager.gradients import Gradients, joined
from collage_neuron.eager.memory import are_alone, bits, is_alone, pool
from collage_neuron.eager.pinned import Pinned
from collage_neuron.eager.presented_layout import Outline, outlines
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.runtime import process_agreement
from collage_neuron.runtime.preconditions import check_once, is_left_alone
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.sharding import is_sharded, local, locals_of
from collage_neuron.states.shared_memory import all_shared, memory_of

if TYPE_CHECKING:
    from collage_neuron.trace.step_kinds import Placeholders

NOBODY: Any = None


@dataclass(eq=False)
class Presentation:
    """The values of an optimizer during one step, or one call of a method."""

    optimizer: Optimizer
    kind: str = "step"
    is_on: bool = False
    values: list[Value] = field(default_factory=list)
    alike: list[Alike] = field(default_factory=list)
    """The values, but for those of which something had the memory before the step, and for empty ones."""
    groups: dict[int, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """The parameters and their groups, by the id of the parameter."""
    all_groups: list[dict[str, Any]] = field(default_factory=list)
    """Those of the optimizer."""
    listed: list[int] = field(default_factory=list)
    """The ids of the parameters in them, as often as they are there."""
    outlines: dict[int, Outline] = field(default_factory=dict)
    """What is presented of each of them."""
    _outlined: list[tuple[Outline, list[int]]] = field(default_factory=list)
    """For those that are alike in it, what their states have beside what the code sees."""
    owners: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """The objects of its values, the parameter first."""
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    """The dtype that each parameter has between steps."""
    has_shards: bool = False
    """True if a parameter is a DTensor."""
    gradients: Gradients = field(init=False)
    _shells: dict[int, torch.Tensor] = field(default_factory=dict)
    pinned: Pinned = field(default_factory=Pinned)
    _aliases: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _are_parts_held: bool = False
    """True if the optimizer holds memory of shards."""
    has_two_names: bool = False
    """True if an object is two states, or a state and a gradient: what a step gives to one of them the other keeps."""
    _waiting: Placeholders | None = None
    _copies: Copies = field(default_factory=Copies)
    _pairs: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What is exchanged to present values that wait, in this step or in the last one."""
    is_as_before: bool = False
    """True if the step has found the objects of the last one."""
    _found: list[int] = field(default_factory=list)
    """The ids of the tensors in states, of a step that had a plan already: those of values are alive."""
    _known: frozenset[int] = frozenset()
    """The ids of objects and words."""
    _names: int = 0
    """How many there are: more, if one has two names."""
    inside: Sequence[int] = ()
    """What was inside the tensors that a step began with whose values have waited."""
    _flags: list[bool] = field(default_factory=list)
    """Which objects require gradients."""
    _grads: list[int] = field(default_factory=list)
    """The ids of gradients in the last step."""
    _all: set[int] = field(default_factory=set)
    """These, and those of objects and words."""
    _words: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The further words of each parameter, and of its states, by their keys."""

    def __post_init__(self) -> None:
        """Makes what presents the gradients."""
        self.gradients = Gradients(self.optimizer)

    def params(self) -> list[Any]:
        """The parameters of all groups, each once, but for frozen ones of other types."""
        return [p for p, _ in self.groups.values()]

    @property
    def presented(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """What was exchanged to present values that wait; nothing if none are presented."""
        return self._pairs if self.is_on else ()

    # --- before the step ------------------------------------------------------------------------------------------

    def plan(self, seen: step_inventory.Seen | None, waiting: Placeholders | None = None) -> set[int]:
        """Finds the values and fills fp32 tensors with them; returns the ids of their objects and words.

        The step has `seen` the states, if they are usual. With `waiting`, the fp32 tensors are its placeholders, which
        are filled when somebody asks for that (`compute`).
        """
        self.values, self._aliases, self._waiting, self.is_as_before = [], [], waiting, False
        self.has_two_names, self._pairs = False, []
        self._copies.end()
        self.groups = self._found_groups()
        self.outlines = dict(zip(self.groups, outlines(self.optimizer, self.params(), seen), strict=True))
        alike: dict[tuple[Any, ...], list[int]] = {}
        for key, outline in self.outlines.items():
            alike.setdefault((outline.is_idle, outline.aside), []).append(key)
        self._outlined = [(self.outlines[keys[0]], keys) for keys in alike.values()]
        self.dtypes = {key: p.dtype for key, (p, _) in self.groups.items()}
        self.has_shards = any(map(is_sharded, self.params()))
        known = {id(p.grad) for p in self.params() if p.grad is not None}
        self._words, self._found = {}, []
        for key, (p, _) in self.groups.items():
            self._plan(p, self.outlines[key], known)
        if waiting is None:
            pinned = self.pinned.among(self.optimizer, self.values)
            others = {id(v) for v, _ in pinned}
            self.alike = by_conversion((v for v in self.values if id(v) not in others), self.groups, self.has_shards)
            self.fill()
            self.pinned.fill(pinned, self._decode_each)
        return known

    def _plan(self, p: Any, outline: Outline, known: set[int]) -> None:
        state: Any = dict.get(self.optimizer.state, p)
        owners = self.owners[id(p)] = [p, *(state[name] for name, *_ in outline.values[1:])]
        for (name, fmt, keys), owner in zip(outline.values, owners, strict=True):
            further = [state[key] for key in keys]
            if id(owner) in known:
                self.has_two_names = True
            else:
                self.values.append(Value(p, name, owner, fmt, further, self._shell(owner), keys))
                self._words.setdefault(id(p), {}).update(zip(keys, further, strict=True))
                known.add(id(owner))
                known.update(map(id, further))

    def _shell(self, owner: torch.Tensor) -> torch.Tensor:
        """Memory for a value."""
        if self._waiting is not None:
            return self._waiting.value(owner)
        # In a step the same each time it is presented, and pinned between steps: variables may refer to it.
        shell = self._shells.get(id(owner))
        if shell is None and (pin := bookkeeping(self.optimizer).pins.get(owner)):
            if pin.memory == memory_of(owner):
                shell = pin.shell
            else:
                pool(self.optimizer).forget(owner)
        if shell is None or shell.shape != owner.shape:
            shell = pool(self.optimizer).shell(owner)
        self._shells[id(owner)] = shell
        return shell

    def fill(self, is_as_before: bool = False) -> None:
        """Fills the fp32 tensors, but for those of which something had the memory before.

        They, and the words, may be laid out as before in a step that does what the last one did.
        """
        filling = self.conversions()
        for each in self.alike:
            each.decode(filling, is_as_before)
        filling.run()

    def conversions(self, are_all: bool = True) -> Conversions:
        """To which conversions are added; if it is not of `are_all`, nothing is known of the layout of its tensors."""
        laid = pool(self.optimizer).laid_out if are_all else None
        return Conversions(laid)

    def _decode_each(self, values: Sequence[Value], into: Sequence[torch.Tensor], are_all: bool = False) -> None:
        """Fills fp32 tensors with values."""
        lookup, filling = Lookup(), self.conversions(are_all)
        for v, x in zip(values, into, strict=True):
            backend = lookup.of(self.groups[id(v.p)][1], v.p)[1]
            filling.decode(backend, v.fmt, v.words(self.is_on), x, v.name)
        filling.run()

    def are_as_before(self, values: Sequence[Value]) -> bool:
        """Returns True if values are those of their words, while they are not presented."""
        small = [v for v in values if v.owner.numel() <= SMALL]
        return all(map(self._are_as_before, [small, *([v] for v in values if v.owner.numel() > SMALL)]))

    def _are_as_before(self, values: Sequence[Value]) -> bool:
        shells = [local(v.shell).detach().float() for v in values]
        copies = [torch.empty_like(local(v.owner), dtype=torch.float32, requires_grad=False) for v in values]
        self._decode_each(values, copies)
        return not values or torch.equal(bits(joined(copies)), bits(joined(shells)))

    def alias(self, tensors: Iterable[torch.Tensor]) -> None:
        """Finds those of `tensors`, which the optimizer holds, that lie in the memory of first words or gradients.

        Raises:
            UnsupportedUpdate: one is more than a part of a first word.
        """
        tensors = list(tensors)
        self.gradients.plan(self.params(), tensors, [v.owner for v in self.values], self._waiting)
        # What is in a DTensor may be held itself: it is alone with its memory.
        self._are_parts_held = held = self.has_shards and self._has_parts(tensors)
        is_usual = are_alone(tensors) and not held
        shared = [] if is_usual else [x for x in tensors if x.numel() and (held or not is_alone(x))]
        near = [v for v in self.values if held or not is_alone(v.owner)] if shared else []
        for i, j in all_shared(shared, locals_of([v.owner for v in near])) if near else ():
            if j >= len(shared):  # not what is held twice
                x = shared[i]
                # What waits cannot have aliases (`can_wait`): it is planned again.
                self._aliases.append((x, x if self._waiting is not None else near[j - len(shared)].part_at(x)))

    def _has_parts(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True if one of `tensors` lies in the memory of a shard."""
        gradients = [p.grad for p in self.params() if p.grad is not None]
        memories = set(map(memory_of, (*(v.owner for v in self.values), *gradients))) - {0}
        return not memories.isdisjoint(map(memory_of, tensors))

    def enter(self) -> None:
        """Presents the values that were planned."""
        self._put_aside()
        # Compared as a whole first: in most steps no flag has to be set. Those of the same objects are the same.
        if not self.is_as_before:
            self._flags = [v.owner.requires_grad for v in self.values]
        if list(map(_requires_grad, [v.shell for v in self.values])) != self._flags:
            for v, flag in zip(self.values, self._flags, strict=True):
                v.shell.requires_grad_(flag)
        self._exchange()
        self.is_on = True
        self.gradients.present(self.params())

    def _put_aside(self) -> None:
        """States have no further words, and those that have nothing else are not there."""
        states, empty = self.states(), getattr(self.optimizer.state, "empty", ())
        for outline, keys in self._outlined:
            if outline.is_idle:
                for p in (p for key in keys if (p := self.groups[key][0]) not in empty):
                    self.optimizer.state.pop(p, None)
                keys = [key for key in keys if self.groups[key][0] in empty]
            own = [states[key] for key in keys] if outline.aside else []
            for name in outline.aside:
                deque(map(dict.pop, own, repeat(name), repeat(None)), maxlen=0)  # two parameters may have one state

    @torch.no_grad()
    def compute(self) -> None:
        """Gives the values that wait memory, and computes them, while they are presented."""
        assert self._waiting is not None
        self._copies.end()
        memory = pool(self.optimizer)
        made = [memory.fill(v.owner, v.shell) for v in self.values]
        self._decode_each(self.values, made, are_all=True)
        self._shells.update((id(v.owner), v.shell) for v in self.values)
        self.gradients.compute(self._waiting)  # first: parameters have them
        for v, into in zip(self.values, made, strict=True):
            if is_sharded(v.owner):  # it is the part that waits
                self._waiting.give(torch_privates.part(v.owner), into)
            else:
                self._waiting.give(v.owner, into.requires_grad_(v.owner.requires_grad))
        self._waiting = None

    def copies(self) -> Copies:
        """Copies of the values that wait, of parameters, states and gradients; it is called without gradients."""
        if not self._copies.has_begun:
            self._copies.begin(self.values, self.gradients.sources(), self.groups, self.conversions)
        return self._copies

    def can_wait(self) -> bool:
        """Returns True if what was planned shares no memory with anything, and nothing of the last step is kept."""
        is_held = self._aliases or self._are_parts_held or self.has_two_names or bookkeeping(self.optimizer).pins
        return not is_held and self.gradients.are_single

    def agreed(self, planned: int, sent: object = None) -> int:
        """What all processes do with the step that have parts of its parameters, one of which has `planned` this."""
        params = self.params()
        return process_agreement.agreed(params, [id(p) in self.gradients.of for p in params], planned, sent)

    @torch.no_grad()
    def restore_words(self) -> None:
        """Ends the presentation of values that have waited, and which nobody has computed."""
        exchange = torch_privates.exchange_shards if self.has_shards else torch_privates.exchange_each
        exchange(reversed(self.presented))
        exchange(reversed(self.gradients.pairs))
        self.is_on = False
        self.put_words()

    def put_words(self) -> None:
        """States have the further words again."""
        states = self.states()
        for key, words in self._words.items():
            if words:
                # The step may have removed it.
                (states[key] if key in states else self.optimizer.state[self.groups[key][0]]).update(words)

    def states(self) -> dict[int, dict[Any, Any]]:
        """The states by the ids of parameters."""
        # Not by the parameters: a tensor is hashed in Python.
        return dict(zip(map(id, self.optimizer.state), self.optimizer.state.values(), strict=True))

    def let_go(self, states: bool = True) -> None:
        """Keeps what was planned for a step with the same structure; `states` too, if it is to, as they are."""
        if not states:
            for v in self.values:
                v.owner, v.further = v.p, []
            self.owners.clear()
            self._words, self._found, self._pairs = {}, [], []
        self._shells.clear()
        self._copies.end()
        self.gradients.let_go()
        self.optimizer = self.gradients.optimizer = NOBODY  # which has it: memory would wait for the collector

    def _found_groups(self) -> dict[int, tuple[Any, dict[str, Any]]]:
        found: dict[int, tuple[Any, dict[str, Any]]] = {}
        self.all_groups, self.listed = list(self.optimizer.param_groups), [*map(id, params_of(self.optimizer))]
        if len(self.listed) > len({*self.listed}):
            check_once(self.optimizer)
        for group in self.all_groups:
            for p in group["params"]:
                if not is_left_alone(p):
                    found.setdefault(id(p), (p, group))
        return found

    def again(self, optimizer: Optimizer, seen: step_inventory.Seen) -> set[int]:
        """What `plan` does, for a step that has `seen` the same structure."""
        self.optimizer = self.gradients.optimizer = optimizer
        self._aliases = []
        self._copies.end()
        if not step_inventory.are_same(self.all_groups, optimizer.param_groups):
            self.groups = self._found_groups()
        ids = seen.ids
        self.is_as_before = ids == self._found
        if not self.is_as_before:
            self._find(dict(zip(map(id, self.params()), seen.state_of(self.params()), strict=True)))
            self._found, self._grads = ids, []
        grads = [id(g) for g in map(_grad, self.params()) if g is not None]
        if not grads or grads != self._grads:
            self._grads, self._all = grads, {*self._known, *grads}
            self.has_two_names = len(self._all) < self._names + len(grads)
        return self._all

    def _find(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Finds the objects, and the further words, in `states`, by the ids of parameters."""
        owners: list[torch.Tensor] = []
        self._words = {}
        for v in self.values:  # those of a parameter follow one another, itself first
            if v.name == "param":
                state, owners = states[id(v.p)], [v.p]
                self.owners[id(v.p)] = owners
            else:
                assert owners[0] is v.p
                v.owner = state[v.name]
                owners.append(v.owner)
            v.further = [state[key] for key in v.keys]
            self._words.setdefault(id(v.p), {}).update(zip(v.keys, v.further, strict=True))
        objects = [*(v.owner for v in self.values), *chain.from_iterable(v.further for v in self.values)]
        self._known, self._names = frozenset(map(id, objects)), len(objects)

    def _exchange(self) -> None:
        torch_privates.forget_casts()
        pairs = self._pairs if self.is_as_before and self._pairs else self.pairs()
        done: list[tuple[torch.Tensor, torch.Tensor]] = []
        try:
            self.gradients.enter(self._waiting)
            if not self.has_shards:
                torch_privates.exchange_all(pairs)
                done = pairs
            else:
                for own, shell in pairs:
                    torch_privates.exchange(own, shell)
                    done.append((own, shell))
            if self._waiting is not None:
                self._pairs = pairs
                self._waiting.present(pairs)
        except BaseException as error:
            if self._waiting is not None:
                self._waiting.withdraw(done)
            for own, shell in reversed(done):
                torch_privates.exchange(own, shell)
            self.gradients.leave(self._waiting)
            if not isinstance(error, RuntimeError):
                raise
            raise UnsupportedUpdate(
                f"something in C++ refers weakly to a parameter or a state, which then cannot be fp32 ({error})"
            ) from error

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The objects, and what is exchanged with them."""
        return [*((v.owner, v.shell) for v in self.values), *self._aliases]

    # --- after it -------------------------------------------------------------------------------------------------

    def leave(self) -> dict[int, tuple[torch.Tensor | None, bool]]:
        """Puts the words back; returns for each parameter its fp32 gradient, and whether it requires one."""
        grads = self.gradients.take(self.params())  # before: what is `p.grad` belongs to what is inside `p`
        left = {id(p): (grads[id(p)], p.requires_grad) for p in self.params()}
        exchange = torch_privates.exchange_shards if self.has_shards else torch_privates.exchange_each
        torch_privates.forget_casts()
        exchange(reversed(self.pairs()))
        self.gradients.leave()
        self.is_on = False
        return left

    def release(self, stored: Any) -> None:
        """Leaves the fp32 values in states that are in no state any more: other code may have them."""
        for v in [v for v in self.values if id(v.owner) not in stored]:
            torch_privates.exchange(v.owner, v.shell)
            self._shells.pop(id(v.owner), None)
            pool(self.optimizer).forget(v.owner)
            self.values.remove(v)

    @torch.no_grad()
    def pin(self, is_over: bool = True) -> None:
        """Keeps the memory of values that something still refers to, and lets go of the rest if the step `is_over`."""
        if is_over:
            self.gradients.keep()
        self.pinned.keep(self.optimizer, self.values, self._decode_each, is_over)

    def clear(self) -> None:
        """Lets go of all tensors."""
        for each in (self.values, self.alike, self._shells, self._aliases, self.outlines, self.owners, self._words):
            each.clear()
        self._copies, self._pairs = Copies(), []
        self.gradients = Gradients(self.optimizer)


_requires_grad, _grad = attrgetter("requires_grad"), attrgetter("grad")
