"""What a step finds, read in a few passes over all parameters, and what follows from that alone, worked out only once.

Most steps find what the last one found: the same parameters, with states of the same keys, types, shapes and devices.
Everything of that kind which a check or a launch depends on is part of `Structure.key`, which is read anew in every
step; if it equals that of the last step, results that depend on nothing else are still right and are kept with it
(`Structure.once`). No state is kept alive, and nothing is known by the id of a state: code may free and exchange states
as before. Parameters are known by their ids, and the structure holds them, so that no id is used again.

What is *not* part of the key is looked at by each step: gradients, versions and addresses, and the numbers in states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import FORMATS
from collage_neuron.states.bookkeeping import ATTRIBUTE, Bookkeeping, bookkeeping
from collage_neuron.states.sharding import ORDINARY

T = TypeVar("T")

_PLAIN = ORDINARY | {type(None), bool, int, float, str}
"""Types whose objects cannot become something else: not wrappers, and no containers."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Parameters and states without their values, and what was found out about them."""

    key: tuple[Any, ...]
    held: tuple[Any, ...]
    """The parameters whose ids are in the key."""
    shapes: dict[torch.Size, torch.Size]
    """All shapes that are in the key."""
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, what: Any, make: Callable[[], T]) -> T:
        """The result called `what`, which must depend on nothing but the key; computed when it is first asked for."""
        if what not in self.known:
            self.known[what] = make()
        found: T = self.known[what]
        return found


@dataclass(frozen=True, eq=False)
class Seen:
    """What the step in progress has found."""

    optimizer: Optimizer
    params: list[torch.nn.Parameter]
    """Those of all groups."""
    owners: list[torch.Tensor]
    """The keys of `optimizer.state`, in its order."""
    states: list[dict[str, Any]]
    """The states of the owners."""
    by_id: dict[int, dict[str, Any]]
    """The same by the ids of the owners: a tensor is hashed in Python."""
    structure: Structure

    def state_of(self, params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The states of `params`; empty ones where there is none."""
        return [self.by_id.get(id(p), {}) for p in params]


def of(optimizer: Optimizer) -> Seen | None:
    """What the step in progress found; None if some of it was changed since, if it is unusual, and between steps."""
    ours: Bookkeeping | None = vars(optimizer).get(ATTRIBUTE)
    found: Seen | None = None if ours is None else ours.seen
    return found if found is not None and found.optimizer is optimizer else None  # shadows share the bookkeeping


def changed(optimizer: Optimizer) -> None:
    """Called where the step in progress changes, or may have changed, keys or types of states."""
    bookkeeping(optimizer).seen = None


def look(optimizer: Optimizer) -> Seen | None:
    """What a step finds; `of` returns it from then on, until something of it is changed.

    None if it is unusual: a tensor of a type of its own (DTensor), or a state that is not a dictionary of plain values.
    """
    ours = bookkeeping(optimizer)
    groups = [group["params"] for group in optimizer.param_groups]
    params = list(chain.from_iterable(groups))
    owners, states = list(optimizer.state), list(optimizer.state.values())
    shapes = {} if ours.structure is None else ours.structure.shapes
    key = _key(params, owners, states, [len(group) for group in groups], ours.formats, shapes)
    if key is None:
        ours.structure = None
        return None
    if ours.structure is None or ours.structure.key != key:
        shapes = {t.shape: t.shape for t in chain(params, *map(dict.values, states)) if isinstance(t, torch.Tensor)}
        ours.structure = Structure(key, (*params, *owners, *ours.formats), shapes)
    by_id = dict(zip(map(id, owners), states, strict=True))
    return Seen(optimizer, params, owners, states, by_id, ours.structure)


_DTYPE, _DEVICE, _SHAPE, _LAYOUT = map(attrgetter, ("dtype", "device", "shape", "layout"))


def _key(
    params: list[Any],
    owners: list[Any],
    states: list[Any],
    sizes: list[int],
    formats: dict[Any, dict[str, str]],
    shapes: dict[Any, Any],
) -> tuple[Any, ...] | None:
    """The key of a structure, or None.

    `shapes` are known ones: a thousand new tuples in every step would keep the garbage collector busy.
    """
    if not (ORDINARY.issuperset(map(type, params)) and ORDINARY.issuperset(map(type, owners))):
        return None
    if not {dict}.issuperset(map(type, states)):
        return None
    values = list(chain.from_iterable(map(dict.values, states)))
    kinds = list(map(type, values))
    if not _PLAIN.issuperset(kinds):
        return None
    tensors = [x for x in values if type(x) in ORDINARY]
    return (
        sizes,
        list(map(id, params)),
        list(map(id, owners)),
        [len(state) for state in states],
        list(chain.from_iterable(states)),
        kinds,
        list(map(_DTYPE, [*params, *tensors])),
        list(map(_DEVICE, [*params, *tensors])),
        [shapes.get(shape, shape) for shape in map(_SHAPE, [*params, *tensors])],
        list(map(_LAYOUT, params)),
        [p.is_contiguous() or p.stride() for p in params],
        [p.is_inference() for p in params],
        # The formats in which states are recorded to be kept, and what those names mean.
        list(map(id, formats)),
        [len(record) for record in formats.values()],
        list(chain.from_iterable(record.items() for record in formats.values())),
        tuple(FORMATS.values()),
    )
