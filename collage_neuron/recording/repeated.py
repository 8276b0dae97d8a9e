"""Recordings of torch's own optimizers without running their code again: only the numbers of a step are computed.

What a step of torch's own classes does depends on the settings of a group, on the numbers in a state, and on what kind
of tensors there are; none of it is hidden. So one recording is followed (`passes.capture.followed`), and is right for
every parameter of any group and for every later step in which only numbers differ, and no comparison has another
result. All else is looked at: settings that are not floats, keys and types of states (the structure of the step,
`steady`), and torch's code. Classes of others are recorded anew in each step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import Optimizer

from collage_neuron.errors import TranslationError
from collage_neuron.passes.capture import position_aware
from collage_neuron.passes.capture.closures import evaluated
from collage_neuron.passes.capture.followed import Followed, Settings, follow, is_same
from collage_neuron.passes.capture.layouts import LAYOUT
from collage_neuron.passes.capture.library_code import is_of_library
from collage_neuron.passes.capture.reach import of_torch
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording.bucketing import record
from collage_neuron.recording.visible import kind_in, visible
from collage_neuron.states import steady
from collage_neuron.states.bookkeeping import bookkeeping


class Repeats:
    """The recordings of one step."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer, seen: steady.Seen) -> None:
        self._base, self._optimizer, self._seen = base, optimizer, seen
        ours = bookkeeping(optimizer)
        self._known: dict[Any, list[Followed | None]] = seen.structure.known.setdefault("followed", {})
        """For each kind of recording those that were followed, and None where that failed."""
        self._compares = ours.steps & (ours.steps + 1) == 0
        """True in steps 1, 2, 4, 8, ...: then the code runs too, once for each kind, and has to give the same."""
        self._done: set[Any] = set()
        self._always = torch.get_default_dtype(), "shape" in ours.asked
        self._lies = LAYOUT in ours.asked
        """True if the code asks how tensors lie in memory, which may be another answer for other gradients."""

    def record(self, group: dict[str, Any], p: torch.nn.Parameter) -> Recording:
        """The recording of the next step for `p`."""
        state = self._optimizer.state.get(p, {})
        kind, settings = kind_in(self._seen, p, state), Settings(group)
        counts = [state[name] for name in kind.tensors]
        if not p.dim() or kind.others or settings.key is None or self._lies or not all(t.is_cpu for t in counts):
            return record(self._base, self._optimizer, group, p)
        key = settings.key, kind.id, p.shape if self._always[1] else None, self._always
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
        if again is None and not is_new and len(known) < _BRANCHES:  # new ones may be new in every step
            known.append(follow(self._base, self._optimizer, group, p, visible(state, p, ()), recording))
        return recording


_KINDS = 4096
"""How many kinds are known before all are forgotten: a setting that is no float may be another one in every step."""
_BRANCHES = 8
"""How many recordings of one kind are followed; code may take other branches in other steps."""


def of_step(base: type[Optimizer], optimizer: Optimizer) -> Repeats | None:
    """The recordings of the step in progress; None if the optimizer's code has to run in every step."""
    seen, cls = steady.of(optimizer), cast(Any, base)
    if seen is None or evaluated(optimizer) is not None or not position_aware.is_of_torch(base):
        return None
    if optimizer.defaults.get("differentiable") or not _has_no_code_of_its_own(cls, tuple(vars(optimizer))):
        return None
    known = seen.structure.known
    places: list[Mapping[str, Any]] = seen.structure.once("places of code", lambda: _places(base))
    code = list(chain.from_iterable(names.values() for names in places))
    if "code" not in known or not steady.are_same(known["code"], code):
        known["code"], known["is of torch"] = code, all(map(is_of_library, code))
        known.pop("followed", None)
    return Repeats(base, optimizer, seen) if known["is of torch"] else None


@lru_cache
def _has_no_code_of_its_own(base: Any, attributes: tuple[str, ...]) -> bool:
    """Returns True if no attribute of the object is in the place of one of its class."""
    own = (k for k in attributes if k not in of_torch() and not k.startswith("_collage") and k != "step")
    return not any(hasattr(base, k) for k in own)


def _places(base: type[Optimizer]) -> list[Mapping[str, Any]]:
    """Where the code of the class is, and what it refers to: the classes, and their modules."""
    classes = base.__mro__[:-1]
    return [*map(vars, classes), *(vars(sys.modules[name]) for name in dict.fromkeys(c.__module__ for c in classes))]
