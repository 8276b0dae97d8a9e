"""The pass `dead-code`: drops operations whose result is not read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from collage_neuron.passes.ir.stage import Stage
from collage_neuron.passes.ir.update import Update


@dataclass(frozen=True)
class EliminateDeadCode:
    """Drops operations whose result nobody reads.

    Given: a decay, which loads the gradient and does not read it::

        widen = widen(param)
        widen_1 = widen(grad)
        widen_2 = widen(state)
        mul = mul(widen_2, c0)

    Result::

        widen = widen(param)
        widen_2 = widen(state)
        mul = mul(widen_2, c0)

    Inputs stay, read or not: they are the signature that backends call.
    """

    name: ClassVar[str] = "dead-code"
    idle: ClassVar[str] = "every result is read"

    def __call__(self, update: Update) -> Update:
        """The update without dead operations; `update` itself if there are none."""
        stages = tuple(map(_without_dead_code, update.stages))
        return update if stages == update.stages else replace(update, stages=stages)


def _without_dead_code(stage: Stage) -> Stage:
    # The same object if nothing is dead: `__call__` tells by that whether the update changes.
    if all(n.users or n.op in ("placeholder", "output") for n in stage.body.nodes):
        return stage
    body = fx.Graph()  # a copy: other updates may have the same stage
    body.output(body.graph_copy(stage.body, {}))
    body.eliminate_dead_code()
    return replace(stage, body=body)
