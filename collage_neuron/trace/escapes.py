"""What outlives a step whose values wait: it has to be a state, a number, or a copy of one, or nobody would compute it.

Python counts who refers to an object, and torch who refers to what is inside. What a step has made, and something
still refers to when it has ended, outlives it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from operator import gt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.trace.calls import Uncompiled, memories_of
from collage_neuron.trace.placeholders import are_marked, placeholder
from collage_neuron.trace.step_kinds import StepKind
from collage_neuron.trace.tensor_places import SHARED

if TYPE_CHECKING:
    from collage_neuron.trace.deferred_calls import DeferredCalls

HOLDERS = 6
"""References to a state that a step has replaced, but for marks: from what is restored if the step raises, its `Value`,
what is presented, the lists of owners and of objects, and the count. Whoever has one more has kept the state itself."""


class References(NamedTuple):
    """What refers to what waits, as a step begins."""

    gradients: list[int]
    """The places of gradients."""
    objects: list[Any]
    """Of DTensors, those of which parts wait, by the places of these; else empty: what waits is in the mode."""
    holders: list[int]
    """References to the objects."""
    of_parts: list[int]
    """Those to what is in DTensors."""


class Outliving(NamedTuple):
    """What outlives a step, which the step may leave there."""

    numbers: list[int]
    """The places of numbers, and of what is made of some; they are not states."""
    temporaries: list[torch.Tensor]
    """What the step has made, for the next one to make once more; empty if something refers to it."""


def outliving(kind: StepKind, mode: DeferredCalls, began: References, marked: Collection[int]) -> Outliving:
    """What outlives a step of a kind; `marked` are the ids of tensors that are remembered between steps.

    Raises:
        Uncompiled: more does, which nobody would compute.
    """
    stays, first, then_parts = kind.left.places(), len(began.holders), began.of_parts
    is_shared = mode.places.are_shared(first, kind.users)
    made = mode.places.let_go(first)
    references = torch_privates.references(made)
    kept = [i for i, n in enumerate(references, first) if n > 2 and i not in stays]  # two: the list's, the count's own
    gone = [n for _, _, n, _ in kind.changed if n is not None and n < first and n not in stays]
    are_parts_kept = bool(then_parts) and (
        any(map(gt, torch_privates.references(mode.tensors), then_parts)) or any(n > 3 for n in references)
    )  # a DTensor has its part
    objects, then = began.objects or mode.tensors, began.holders
    now = torch_privates.references(objects)
    more = any(now[i] > then[i] for i in began.gradients)
    more = more or any(now[i] > HOLDERS + (id(objects[i]) in marked) for i in gone)  # it would have no value
    mode.tensors += made
    returned = any(n > 3 for n in torch_privates.references(list(mode.adopted.others.values())))
    if is_shared or more or returned or are_parts_kept or not _are_numbers(kept, first, stays, mode):
        raise Uncompiled(SHARED)
    are_gone = [True] * len(made)
    for i in (*kept, *(i for i in stays if i is not None and i >= first)):
        are_gone[i - first] = False
    are_params = any(i is not None and i >= first for i in kind.left.params)
    if are_params or are_marked([*compress(made, are_gone)]):
        return Outliving(kept, [])
    changed = {i: _alike(made[i - first]) for i in kept}  # a number that is kept is the code's
    for i, t in (changed | {i: other for i, other in mode.adopted.others.items() if i in stays}).items():
        made[i - first] = t
    return Outliving(kept, made)


def _alike(t: torch.Tensor) -> torch.Tensor:
    return placeholder(t.shape, t.stride(), t.dtype, t.device, int(t.storage_offset()))


def _are_numbers(kept: Sequence[int], first: int, stays: set[int | None], mode: DeferredCalls) -> bool:
    """Returns True if what outlives a step are numbers, or made of some, that nothing else has the memory of."""
    if mode.are_of_values([i for i in kept if mode.tensors[i].numel() != 1], first):
        return False
    memories = memories_of(mode.calls, len(mode.tensors)) if kept else []
    own, others = [memories[i] for i in kept], {memories[i] for i in stays if kept and i is not None}
    return len(set(own)) == len(own) and others.isdisjoint(own) and all(memory >= first for memory in own)
