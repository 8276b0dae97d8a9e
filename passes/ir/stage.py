"""Stages: an update is a sequence of stages, each one graph over the elements and the results of earlier stages.

Every update of today is one elementwise stage. The type has room for what optimizers with norms, row means or matrix
products need::

    stage 0, reduction:    grad                 -> norm             (one number, summed over all elements)
    stage 1, elementwise:  param, grad, norm    -> param, param_lo

Between two stages is where a sharded parameter needs its all-reduce: only there is a sum complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.fx as fx

ELEMENTWISE, REDUCTION, OPAQUE = "elementwise", "reduction", "opaque"

KINDS: Mapping[str, str] = {
    ELEMENTWISE: "each element by itself, in explicit-rounding form: every backend keeps every rounding",
    REDUCTION: "small tensors from many elements, in explicit-rounding form; backends choose the order of additions",
    OPAQUE: "operations as they are written, in fp32: nothing is promised about their roundings",
}
"""The kinds of stages: what each does, and what is guaranteed for its results."""


class Reduced(NamedTuple):
    """A small tensor that a reduction gives to the stages after it."""

    name: str
    dims: tuple[int, ...] | None = None
    """Dimensions of the parameter that are reduced away; None is all of them."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One graph of an update.

    The monitor's sums and counts are reductions too, but no stage reads them: they are extra results of the elementwise
    stage that stores the components (`Update.sums`, `Update.counts`), found in the same pass over memory.
    """

    kind: str
    """A key of KINDS."""
    body: fx.Graph
    """Placeholders: `inputs`, then `index` if the update draws random bits, then the entries of the scalar vector."""
    inputs: tuple[str, ...]
    """Keys of what it reads: components as they were before the step, and results of earlier stages."""
    outputs: tuple[str, ...]
    """Parameter-shaped results, in order: new components, and values that only later stages read."""
    reduced: tuple[Reduced, ...] = ()
    """Small tensors that it returns after those."""

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The body as a module that can be called; made when first asked for."""
        return fx.GraphModule(torch.nn.Module(), self.body)

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of all that it returns."""
        return (*self.outputs, *(r.name for r in self.reduced))

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.inputs)} -> {', '.join(self.gives)}"
