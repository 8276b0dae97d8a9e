"""What a step finds, read in a few passes over all parameters, and what follows from that alone, worked out only once.

Most steps find what the last one found: the same parameters, with states of the same keys, types, shapes and devices.
Everything of that kind which a check or a launch depends on is part of `Structure.key`, which is read anew in every
step; if it equals that of the last step, results that depend on nothing else are still right and are kept with it
(`Structure.once`). No state is kept alive: code may free and exchange states as before, and an id of a state tells it
only beside its address. Parameters are known by their ids, and the structure holds them, so that no id is used again.

What is *not* part of the key is looked at by each step: gradients, versions and addresses, and the numbers in states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import FORMATS, is_component
from collage_neuron.states.bookkeeping import ATTRIBUTE, Bookkeeping, bookkeeping, params_of
from collage_neuron.states.sharding import Guard, are_sharded_alike, locals_of
from collage_neuron.states.shared_memory import tells

T = TypeVar("T")

Gradients = tuple[tuple[bool, ...], Sequence[torch.Tensor] | None]
"""Which parameters have gradients, and the parts of these; None if one is not sharded as its parameter is."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Parameters and states without their values, and what was found out about them."""

    key: tuple[Any, ...]
    held: tuple[Any, ...]
    """The parameters that have these states: those of the groups, the owners, and those whose formats are recorded."""
    are_tensors: tuple[bool, ...]
    """For each value in the states, one after the other, True if it is a tensor."""
    lie_somewhere: tuple[bool, ...]
    """For each parameter and each value in the states, True if it tells its address, and is no further word."""
    guard: Callable[..., bool]
    """Says of parameters and of the tensors in states whether they are of the same types, dtypes, shapes, ..."""
    known: dict[Any, Any] = field(default_factory=dict)

    def is_of(self, key: tuple[Any, ...], held: Sequence[object], params: list[Any], tensors: list[Any]) -> bool:
        """Returns True for the same parameters, and states whose `tensors` differ in nothing but what is in them."""
        return self.key == key and are_same(self.held, held) and self.guard(*params, *tensors)

    def once(self, what: Any, make: Callable[[], T]) -> T:
        """The result called `what`, which must depend on nothing but the key; computed when it is first asked for."""
        if what not in self.known:
            self.known[what] = make()
        result: T = self.known[what]
        return result

    def table(self, what: Any) -> dict[Any, Any]:
        """Results called `what` by keys, for what depends on more than the structure; `keep` adds to it."""
        result: dict[Any, Any] = self.known.setdefault(what, {})
        return result

    def keep(self, table: dict[Any, Any], key: Any, value: T) -> T:
        """Adds to a table, which forgets the oldest of more results than its groups can need in a step."""
        table.pop(key, None)
        if len(table) >= _KEPT * (1 + len(self.key[0])):
            del table[next(iter(table))]
        table[key] = value
        return value


_KEPT = 16
"""Results that a table has room for, for each group: gradients may be missing of some parameters, or of other types."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What the step in progress has found."""

    optimizer: Optimizer
    params: list[torch.nn.Parameter]
    """The parameters of all groups."""
    owners: list[torch.Tensor]
    """The keys of `optimizer.state`, in its order."""
    states: list[dict[str, Any]]
    """The states of the owners."""
    structure: Structure
    ids: list[int]
    """Those of the tensors in the states, one after the other: nothing is kept alive by them."""
    backends: dict[Any, Any] = field(default_factory=dict)
    """The backends of this step, by settings and device."""

    def state_of(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The states of `params`; empty ones where there is none."""
        if are_same(params, self.owners):
            return self.states
        return [self._by_id.get(id(p), {}) for p in params]

    def has(self, states: Mapping[int, dict[str, Any]]) -> bool:
        """Returns True if parameters, by their ids, have the dictionaries that the step has found."""
        return all(states.get(id(p), own) is own for p, own in zip(self.owners, self.states, strict=True))

    def with_others(self) -> Seen:
        """The same where states have got other tensors, of the same types."""
        values = chain.from_iterable(map(dict.values, self.states))
        return replace(self, ids=[*map(id, compress(values, self.structure.are_tensors))])

    def gradients(self) -> Gradients:
        """Which of the parameters have gradients, and the parts of these.

        None if one is sharded in another way.
        """
        grads = list(map(attrgetter("grad"), self.params))
        have = tuple(map(is_not, grads, repeat(None)))
        there = list(compress(grads, have))
        parts = locals_of(there)
        return have, parts if parts is there or are_sharded_alike(there, [*compress(self.params, have)]) else None

    def lying(self) -> Sequence[torch.Tensor]:
        """The parameters and states, or parts of these, of which each step looks where they lie."""
        values = chain.from_iterable(map(dict.values, self.states))
        return locals_of([*compress(chain(self.params, values), self.structure.lie_somewhere)])

    @cached_property
    def _by_id(self) -> dict[int, dict[str, Any]]:
        """The states by the ids of the owners: a tensor is hashed in Python."""
        return dict(zip(map(id, self.owners), self.states, strict=True))


def once(optimizer: Optimizer, what: Any, make: Callable[[], T]) -> T:
    """`Structure.once` of what the step in progress has found; between steps, and in an unusual one, made anew."""
    in_step = of(optimizer)
    return make() if in_step is None else in_step.structure.once(what, make)


def states_of(optimizer: Optimizer, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """The states of `params`, of what the step has found if it did; else new ones where there is none."""
    in_step = of(optimizer)
    return [optimizer.state[p] for p in params] if in_step is None else in_step.state_of(params)


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Returns True if both hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


def of(optimizer: Optimizer) -> Seen | None:
    """What the step in progress found; None if some of it was changed since, if it is unusual, and between steps."""
    book: Bookkeeping | None = vars(optimizer).get(ATTRIBUTE)
    in_step: Seen | None = None if book is None else book.seen
    return in_step if in_step is not None and in_step.optimizer is optimizer else None  # shadows share the bookkeeping


def changed(optimizer: Optimizer) -> None:
    """Called where the step in progress changes, or may have changed, keys or types of states."""
    bookkeeping(optimizer).seen = None


def look(optimizer: Optimizer) -> Seen | None:
    """What a step finds; `of` returns it from then on, until something of it is changed.

    None if it is unusual: a tensor of a type of its own, but for DTensors, or a state that is not a dictionary. What is
    in a list, or another object, in a state is kept as the optimizer makes it, and nothing that is known depends on it.
    """
    book, params = bookkeeping(optimizer), params_of(optimizer)
    owners, states = list(optimizer.state), list(optimizer.state.values())
    try:
        values = list(chain.from_iterable(map(dict.values, states)))
    except TypeError:  # one is no dictionary
        book.structure = None
        return None
    key, held = _key(optimizer, states, values, list(book.formats.values())), (*params, *owners, *book.formats)
    tensors = [] if book.structure is None else list(compress(values, book.structure.are_tensors))
    if book.structure is None or not book.structure.is_of(key, held, params, tensors):
        are_tensors = tuple(isinstance(x, torch.Tensor) for x in values)
        tensors = list(compress(values, are_tensors))
        guard = Guard.of([*params, *tensors]) if _are_plain(owners, states) else None
        if guard is None:
            book.structure = None
            return None
        own = chain.from_iterable(((not is_component(k, state), x) for k, x in state.items()) for state in states)
        lie = tuple(is_own and torch.is_tensor(x) and tells(x) for is_own, x in chain(zip(repeat(True), params), own))
        book.structure = Structure(key, held, are_tensors, lie, guard)
    return Seen(optimizer, params, owners, states, book.structure, [*map(id, tensors)])


def _are_plain(owners: Sequence[Any], states: Sequence[Any]) -> bool:
    """Returns False if a parameter or a state is unusual; of tensors the guard says it."""
    return all(isinstance(x, torch.Tensor) for x in owners) and {dict}.issuperset(map(type, states))


def _key(
    optimizer: Optimizer, states: Sequence[dict[str, Any]], values: Sequence[Any], records: Sequence[dict[str, str]]
) -> tuple[Any, ...]:
    """What equals that of the last step if this one finds the same; `records` are the formats that are recorded."""
    return (
        [len(group["params"]) for group in optimizer.param_groups],
        list(map(type, states)),
        list(map(len, states)),
        list(chain.from_iterable(states)),
        list(map(type, values)),
        list(map(len, records)),
        list(chain.from_iterable(records)),
        list(chain.from_iterable(map(dict.values, records))),
        tuple(FORMATS.values()),  # what the names of formats mean
    )
