"""Checks that what a step does to a parameter depends on the answers for that parameter alone.

A comparison of numbers that are read from tensors has no result while a step is recorded (`passes.capture.outcomes`). A
parameter alone is recorded for each answer; recorded jointly, all parameters get the answer True. Code may combine the
outcomes of several parameters (`all(norms[i] < 1 for i in ...)`, or a count of them), which neither of these shows. So
joint steps are recorded in which parameters get different answers, and each part is compared with the recording of that
parameter for its own answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.passes.capture import position_aware
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.host_state import untraced
from collage_neuron.passes.capture.joint import Joint
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording.bucketing import naming, recordings
from collage_neuron.recording.independence import confirm, host_side
from collage_neuron.states.bookkeeping import bookkeeping

PATTERNS = 2
"""Joint steps with random answers; as many have the opposite ones."""


def check(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Compares joint steps with different answers with recordings of the next step, if it asks for any.

    Raises:
        UnsupportedUpdate: they differ; nothing has been changed.
    """
    groups = optimizer.param_groups
    found = {p: r for g in groups for params, r in recordings(base, optimizer, g, g["params"]) for p in params}
    check_step(base, optimizer, found)


def check_step(base: type[Optimizer], optimizer: Optimizer, found: Mapping[Any, Recording]) -> None:
    """The same for the recordings of a step, by parameter. Classes of torch.optim do not need it."""
    if position_aware.is_of_torch(base) or not any(recording.compared for recording in found.values()):
        return
    for answers in _patterns(_MOST * len(found)):
        with naming(base), untraced(base, optimizer) as host:
            alone = host_side(base, optimizer)
            host.instead_of(optimizer, alone)
            joint = Joint(base, alone, follow=True, made=bookkeeping(optimizer).makes_small, answers=answers)
            confirm(joint, optimizer, found, _Own(base, alone, found).recording)


_MOST = 4
"""Answers for each parameter; a step that asks for more than three comparisons is rejected."""


def _patterns(count: int) -> Iterator[tuple[bool, ...]]:
    for seed in range(PATTERNS):
        drawn = random.Random(seed).choices((True, False), k=count)
        yield tuple(drawn)
        yield tuple(not x for x in drawn)


class _Own:
    """The recordings of parameters alone, for given answers."""

    def __init__(self, base: type[Optimizer], alone: Optimizer, found: Mapping[Any, Recording]) -> None:
        self._base, self._alone, self._found = base, alone, found
        self._groups = {p: group for group in alone.param_groups for p in group["params"]}
        self._recorded = cache(self._record)
        self._first: dict[int, Any] = {}

    def recording(self, p: torch.Tensor, answers: tuple[bool, ...]) -> Recording:
        """That of the parameter; of those that share a recording, the first one's."""
        found = self._found[p]
        return self._recorded(self._first.setdefault(id(found), p), answers) if found.compared else found

    def _record(self, p: Any, answers: tuple[bool, ...]) -> Recording:
        state, made = self._alone.state.get(p, {}), bookkeeping(self._alone).makes_small
        return capture(self._base, self._alone, self._groups[p], p, state, made, answers)
