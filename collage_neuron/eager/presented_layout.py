"""What a step as written presents of each parameter, in so far as it follows from the structure of the states alone.

Steps find it anew only if there are other states than in the last step, or states of other types
(`states/step_inventory.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.state_keys import names_in, values_in
from collage_neuron.states.store import is_idle, kept_format, record_of


class Named(NamedTuple):
    """A parameter or a state in words."""

    name: str
    format: Format
    further: tuple[str, ...]
    """The keys of all words but the first one."""


@dataclass(frozen=True, eq=False)
class Outline:
    """The values of a parameter, and the other keys of its state."""

    values: tuple[Named, ...]
    own: tuple[Any, ...]
    """The keys that the optimizer's code sees."""
    aside: tuple[Any, ...]
    """The keys of further words, which it does not see."""
    is_idle: bool
    """True if the state has nothing else: the code sees no state."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the values."""
        return tuple(each.name for each in self.values)


def outlines(optimizer: Optimizer, params: Sequence[torch.Tensor], seen: step_inventory.Seen | None) -> list[Outline]:
    """The outline of each of `params`, which are those of all groups, in a step that has `seen` the states."""
    as_made = bookkeeping(optimizer).as_made
    if seen is None:
        return [_outline(optimizer, p) for p in params]
    others = tuple((id(p), frozenset(names)) for p, names in as_made.items())  # the structure does not tell these
    return seen.structure.once(("outlines", others), lambda: [_outline(optimizer, p) for p in params])


def _outline(optimizer: Optimizer, p: torch.Tensor) -> Outline:
    found, record = dict.get(optimizer.state, p), record_of(optimizer, p)
    state = found if isinstance(found, dict) else {}
    names, as_made = names_in(state), bookkeeping(optimizer).as_made
    others = as_made.get(p, ()) if as_made else ()  # a tensor is hashed in Python, and most optimizers have none
    found_in = (k for k in values_in(state, p, record) if _is_in_words(p, state, k, record))
    values = ["param", *(k for k in found_in if k in record or k not in others)]
    formats = {name: kept_format(p, state, name, record) for name in values}
    return Outline(
        tuple(Named(name, fmt, tuple(fmt.keys(name)[1:])) for name, fmt in formats.items()),
        names.own,
        tuple(key for key in state if key not in names.own),
        isinstance(found, dict) and is_idle(found),
    )


def _is_in_words(p: torch.Tensor, state: Mapping[str, Any], name: str, record: Mapping[str, str]) -> bool:
    """Returns True for a state that is stored in a format: others are as they were made."""
    return name in record or name in names_in(state).watched or state[name].dtype in (p.dtype, torch.bfloat16)
