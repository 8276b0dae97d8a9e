"""A step that leaves what it found: the next one presents and stores the same, without a look at each value.

Most steps find the same parameters and states in the same formats, write to them in place, and leave no others. Which
words belong to which fp32 memory, and what is converted together, is then that of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.memory import lies_like, pool
from collage_neuron.eager.presented_layout import Outline, outlines
from collage_neuron.settings import Settings
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import ORDINARY

if TYPE_CHECKING:
    from collage_neuron.eager.presentation import Presentation

_NO_STATE: dict[Any, Any] = {}


@dataclass(frozen=True, eq=False)
class Steady:
    """What a step has presented, and left. No state is kept alive."""

    presentation: Presentation
    structure: step_inventory.Structure
    outlines: Sequence[Outline]
    settings: list[Settings]
    """Those of the groups that have parameters."""
    guard: Callable[..., bool]
    """Says of fp32 tensors whether they are shaped and laid out as those of that step."""

    @classmethod
    def of(cls, shown: Presentation, structure: step_inventory.Structure) -> Steady | None:
        """What a step that has left all in its formats has presented; None if something of it needs a closer look."""
        shells = [v.shell for v in shown.values]
        if shown.has_two_names or not ORDINARY.issuperset(map(type, shells)):
            return None
        if not all(
            x.dtype == torch.float32 and lies_like(x, v.owner) for x, v in zip(shells, shown.values, strict=True)
        ):
            return None
        outlined = list(shown.outlines.values())
        return cls(shown, structure, outlined, _settings(shown), torch_privates.guard(shells))

    def begin(self, optimizer: Optimizer, seen: step_inventory.Seen) -> set[int] | None:
        """What `Presentation.plan` does, if the step has `seen` the same; else None."""
        if seen.structure is not self.structure or bookkeeping(optimizer).pins:
            return None
        shown, params = self.presentation, self.presentation.params()
        if not step_inventory.are_same(outlines(optimizer, params, seen), self.outlines):
            return None
        known = shown.again(optimizer, seen)
        owners, shells = [v.owner for v in shown.values], [v.shell for v in shown.values]
        # Last, since it notes which memory is used in this step.
        if shown.has_two_names or _settings(shown) != self.settings or not pool(optimizer).are_those_of(owners, shells):
            return None
        shown.fill(is_as_before=True)
        return known

    def is_left(self) -> bool:
        """Returns True if the step has left the objects that it found, and other states are numbers, or no tensors.

        What has no gradient it has not changed. It is asked when nothing is presented any more.
        """
        shown = self.presentation
        if _settings(shown) != self.settings:
            return False
        by_id = shown.states()
        states = [by_id.get(key, _NO_STATE) for key in shown.groups]
        if not {dict}.issuperset(map(type, states)) or [*map(tuple, states)] != [each.own for each in self.outlines]:
            return False
        owners, values = (
            [v.owner for v in shown.values if v.name != "param"],
            chain.from_iterable(map(dict.values, states)),
        )
        ids, found, others = set(map(id, owners)), list[Any](), list[Any]()
        for x in values:
            (found if id(x) in ids else others).append(x)
        if not step_inventory.are_same(found, owners):
            return False
        if any(isinstance(x, torch.Tensor) and x.numel() != 1 for x in others):  # a new state may need words
            return False
        # Of parameters with a gradient all is stored; what has none is not, so it must be as it was.
        idle = [v for v in shown.values if id(v.p) not in shown.gradients.of]
        return self.guard(*(v.shell for v in shown.values)) and shown.are_as_before(idle)


def _settings(shown: Presentation) -> list[Settings]:
    groups = {id(group): group for _, group in shown.groups.values()}
    return list(map(Settings.of, groups.values()))
