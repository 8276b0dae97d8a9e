"""What a parameter and its state hold where everything is kept in its format: all that a steady step has to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.update import Captured
from collage_neuron.states import steady
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.format_record import record_of
from collage_neuron.states.state_keys import suffixes
from collage_neuron.states.store import ensure_stored


def ensure_all_stored(
    optimizer: Optimizer,
    params: Sequence[torch.Tensor],
    formats: Mapping[str, Format],
    captured: Captured,
) -> None:
    """Creates the states of `params` that are not there yet, as their update does; moves others into `formats`."""
    layout, seen = _layout(tuple(formats.items()), suffixes()), steady.of(optimizer)
    if seen is not None and seen.structure.once(layout, lambda: layout.stored_in(seen)).issuperset(map(id, params)):
        return
    recorded = bookkeeping(optimizer).formats
    for p in params:
        state = optimizer.state[p]
        if not layout.is_that_of(p, state, recorded.get(p, {})):
            steady.changed(optimizer)
            bookkeeping(optimizer).marks.states.pop(p, None)  # what is stored now is ours
            record = record_of(optimizer, p)
            for name, fmt in formats.items():
                fill, shape = captured.fresh.get(name, 0.0), captured.shapes.get(name)
                ensure_stored(p, state, name, fmt, fill, record, shape)


@dataclass(frozen=True, eq=False)
class _Layout:
    """The words of a parameter and its states in their formats."""

    formats: Mapping[str, str]
    """The names of the formats, as they are recorded."""
    param: torch.dtype | None
    """The type of the parameter itself, if a format says so."""
    words: Mapping[str, torch.dtype]
    """The keys of the state, and the types of the tensors there."""
    others: frozenset[str]
    """Keys of further words that are of other formats."""

    def stored_in(self, seen: steady.Seen) -> frozenset[int]:
        """The ids of the parameters for which `ensure_stored` has nothing to do."""
        recorded = bookkeeping(seen.optimizer).formats
        pairs = zip(seen.params, seen.state_of(seen.params), strict=True)
        return frozenset(id(p) for p, state in pairs if self.is_that_of(p, state, recorded.get(p, {})))

    def is_that_of(self, p: torch.Tensor, state: Mapping[str, Any], record: Mapping[str, str]) -> bool:
        """Returns True if `ensure_stored` has nothing to do."""
        if (self.param is not None and p.dtype != self.param) or not self.formats.items() <= record.items():
            return False
        device = p.device
        for key, dtype in self.words.items():
            word = state.get(key)
            if not isinstance(word, torch.Tensor) or word.dtype != dtype or word.device != device:
                return False
        return self.others.isdisjoint(state)


@lru_cache
def _layout(formats: tuple[tuple[str, Format], ...], endings: frozenset[str]) -> _Layout:
    types = {key: c.type.dtype for name, f in formats for key, c in zip(f.keys(name), f.components, strict=True)}
    others = {name + suffix for name, _ in formats for suffix in endings} - types.keys()
    return _Layout({name: f.name for name, f in formats}, types.pop("param", None), types, frozenset(others))
