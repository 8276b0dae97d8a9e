"""Low words that another optimizer keeps, or has left, of the same parameters.

A new optimizer over a compiled model (a warm restart, the next stage of a training) begins with the values that the
last one left, and not with their high words alone. The last one may be gone by then: `optimizer = AdamW(...)` lets go
of it before the new one is compiled. So when a compiled optimizer goes, its low words stay with the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.optimizer.waiting import is_compiled
from collage_neuron.runtime import wrappers
from collage_neuron.settings import Settings
from collage_neuron.states import low_words
from collage_neuron.states.bookkeeping import Bookkeeping
from collage_neuron.states.format_record import record_of
from collage_neuron.states.marks import Mark, Marks, mark_of
from collage_neuron.states.state_keys import split_params
from collage_neuron.states.store import read_exact, store

LEFT = "_collage_left"
"""An attribute of parameters whose compiled optimizer is gone: a `Left`."""


class Left(NamedTuple):
    """The further words of a parameter."""

    words: Mapping[str, torch.Tensor]
    record: Mapping[str, str]
    """Their format, as in the record of the optimizer that is gone."""
    mark: Mark
    """Of the parameter when they were its own."""

    def fits(self, p: torch.Tensor) -> bool:
        """Returns True if the parameter was not written since."""
        return self.mark == mark_of(p)


def leave_words(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """Sees to it, once, that low words stay with the parameters when the optimizer goes."""
    if ours.leaving is None:
        ours.leaving = weakref.finalize(optimizer, _leave, ours.words, ours.formats, ours.marks)
        ours.leaving.atexit = False


def _leave(
    words: Mapping[torch.Tensor, Mapping[str, torch.Tensor]],
    formats: Mapping[torch.Tensor, Mapping[str, str]],
    marks: Marks,
) -> None:
    for p, further in words.items():
        _, mark = marks.params.get(p, ("", None))
        if mark is not None:
            record = {name: fmt for name, fmt in formats.get(p, {}).items() if name == "param"}
            setattr(p, LEFT, Left(dict(further), record, mark))


@torch.no_grad()
def continue_from_others(optimizer: Optimizer) -> None:
    """Gives bf16 parameters of `optimizer` without low words those that another compiled one keeps of them, or left."""
    split = split_params(optimizer.state)
    bare = {p: group for group in optimizer.param_groups for p in group["params"] if _is_bare(p) and p not in split}
    for p, value in _values(optimizer, set(bare)) if bare else ():
        fmt = formats_for(Settings.of(bare[p]).strategy, (), NO_ROLES, p.dtype)["param"]
        if len(fmt.components) > 1:
            store(p, optimizer.state[p], "param", fmt, value, record_of(optimizer, p))
            low_words.remember(optimizer, p, low_words.FRESH)


def _values(optimizer: Optimizer, params: set[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The exact values of parameters, of those of which somebody has low words."""
    for other, p in _kept_elsewhere(optimizer, params):
        exact = read_exact(p, other.state[p], "param", record_of(other, p))
        params = params - {p}
        yield p, low_words.without_stale(other, p, exact)
    for p in params:
        left: Left | None = vars(p).pop(LEFT, None)
        if left is not None and left.fits(p):
            yield p, read_exact(p, left.words, "param", left.record)


def _is_bare(p: torch.Tensor) -> bool:
    return p.dtype == torch.bfloat16 and not p.is_meta


def _kept_elsewhere(optimizer: Optimizer, params: set[torch.Tensor]) -> Iterator[tuple[Optimizer, torch.Tensor]]:
    """The parameters that other optimizers keep low words of, each once."""
    for other in filter(is_compiled, wrappers.instances("torch.optim", "Optimizer")):
        state = vars(other).get("state", {})  # there is none yet while one is built
        shared = split_params(state) & params if other is not optimizer else set()
        params = params - shared
        yield from ((other, p) for p in shared)
