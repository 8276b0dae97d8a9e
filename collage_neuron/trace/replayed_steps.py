"""Recordings of torch's own optimizers without running their code again: only the numbers of a step are computed.

What a step of torch's own classes does depends on the settings of a group, on the numbers in a state, and on what kind
of tensors there are; none of it is hidden. So one recording is followed (`followed`), and is right for every parameter
of any group and for every later step in which only numbers differ, and no comparison has another result. All else is
looked at: settings that are not floats, and keys and types of states (the structure of the step, `step_inventory`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import TranslationError
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import GroupNumbers
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.visible_states import kind_in
from collage_neuron.trace.meta_copy import record
from collage_neuron.trace.recorded_classes import Followed, follow, is_same, settings_of

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Records
    from collage_neuron.trace import dry_run


Known = dict[Any, list["Followed | None"]]
"""For each kind of recording those that were followed, and None where that failed."""


class Repeats:
    """The recordings of one step."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer, seen: step_inventory.Seen, known: Known) -> None:
        self._base, self._optimizer, self._seen, self._known = base, optimizer, seen, known
        self._compares = bookkeeping(optimizer).compares
        self._done: set[Any] = set()
        self._dtype = torch.get_default_dtype()

    def record(self, group: dict[str, Any], p: torch.nn.Parameter) -> Recording:
        """The recording of the next step for `p`."""
        state = self._optimizer.state.get(p, {})
        kind, settings = kind_in(self._seen, p, state), GroupNumbers(group, settings_of(self._base))
        counts = [state[name] for name in kind.tensors]
        if kind.others or settings.key is None or not all(t.is_cpu for t in counts):
            return record(self._base, self._optimizer, group, p)
        key = settings.key, kind.id, self._dtype
        if len(self._known) >= _KINDS:
            self._known.clear()
        is_new, known, numbers = key not in self._known, self._known.setdefault(key, []), [*settings.numbers, *counts]
        again = next((found for one in known if one is not None and (found := one.again(numbers))), None)
        if again is not None and not (self._compares and key not in self._done):
            return again
        self._done.add(key)
        recording = record(self._base, self._optimizer, group, p)
        if again is not None and not is_same(again, recording):
            raise TranslationError(
                f"the step of {self._base.__name__} has other numbers than were computed from its settings and counts: "
                f"{recording.slots} and {again.slots}. Nothing was updated; this is a fault of collage_neuron"
            )
        # A state of a 0-d parameter may look like a count, where its format is not known yet.
        is_clear = set(kind.tensors).isdisjoint(recording.captured.states)
        if again is None and not is_new and is_clear and len(known) < _BRANCHES:  # new ones may be new in every step
            known.append(follow(self._base, self._optimizer, group, p, recording))
            return replace(recording, followed=known[-1])
        return recording


# How many kinds are known before all are forgotten: a setting that is no float may be another one in every step.
_KINDS = 4096
_BRANCHES = 8  # recordings of one kind that are followed; code may take other branches in other steps


def of_step(base: type[Optimizer], optimizer: Optimizer) -> Records:
    """What has the recordings of the step in progress."""
    seen = step_inventory.of(optimizer)
    return _records(base, optimizer, seen, {} if seen is None else seen.structure.table("followed"))


def before_step(base: type[Optimizer], optimizer: Optimizer) -> Records:
    """What has the recordings of the next step, as long as nothing is changed; the step itself makes them anew."""
    book = bookkeeping(optimizer)
    structure = book.structure
    try:
        return _records(base, optimizer, step_inventory.look(optimizer), {})
    finally:
        book.structure = structure


def records(base: type[Optimizer], optimizer: Optimizer, known: dry_run.Known | None) -> Records:
    """What has the recordings of the next step: what is known of it, or else recordings."""
    return before_step(base, optimizer) if known is None else known.record


def _records(base: type[Optimizer], optimizer: Optimizer, seen: step_inventory.Seen | None, known: Known) -> Records:
    return partial(record, base, optimizer) if seen is None else Repeats(base, optimizer, seen, known).record
