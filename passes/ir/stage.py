"""Stages: an update is a sequence of stages, each one graph over the elements and the results of earlier stages.

Most updates are one elementwise stage. Those of optimizers with norms have several, which the pass `cut` makes (LAMB)::

    stage 0, reduction:    param, grad -> reduced0, reduced1       (one number each, of all elements)
    stage 1, numbers:      reduced0, reduced1 -> number0           (their quotient)
    stage 2, elementwise:  param, grad, number0 -> param, param_lo

Over a parameter in shards, what DTensor adds up between processes is a stage too: each process runs the stages on its
own part, and those of this kind are where they meet.

All stages read the components as they were before the step, and only the last one stores any: what an earlier stage has
computed of each element is computed again, instead of being kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.fx as fx

ELEMENTWISE, REDUCTION, NUMBERS, BETWEEN = "elementwise", "reduction", "numbers", "between processes"
JOINED = "joined"

KINDS: Mapping[str, str] = {
    ELEMENTWISE: "each element by itself, in explicit-rounding form: every backend keeps every rounding",
    REDUCTION: "small tensors from many elements, in explicit-rounding form, added as `numerics.reductions` defines",
    NUMBERS: "small tensors from small tensors, in explicit-rounding form",
    BETWEEN: "numbers of a part of a parameter from those of all parts, of which other processes have some",
    JOINED: "an elementwise stage with reductions in between: what `cut` makes stages of",
}
"""The kinds of stages: what each does, and what is guaranteed for its results."""


def returned(graph: fx.Graph) -> Any:
    """What a graph returns."""
    return next(node for node in reversed(graph.nodes) if node.op == "output").args[0]


T = TypeVar("T")


def ancestors(nodes: Iterable[T], inputs: Callable[[T], Iterable[T]]) -> dict[T, None]:
    """The nodes, and all that they are computed from, by those inputs of each that count."""
    found, todo = dict[T, None](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            todo += inputs(node)
    return found


def rearranged(body: fx.Graph, order: Iterable[str], results: Iterable[fx.Node]) -> fx.Graph:
    """A copy of a graph with these placeholders first, in this order, and results of its nodes as its own."""
    graph, given = fx.Graph(), {str(node.target): node for node in body.nodes if node.op == "placeholder"}
    made = {given[name]: graph.placeholder(name) for name in order}
    graph.graph_copy(body, made)  # which also notes what it makes of the other nodes
    graph.output(tuple(made[node] for node in results))
    # Operations that led to other results of the body alone are in the copy still.
    graph.eliminate_dead_code()
    return graph


@dataclass(frozen=True, eq=False)
class Stage:
    """One graph of an update.

    The monitor's sums and counts are reductions too, but no stage reads them: they are extra results of the elementwise
    stage that stores the components (`Update.sums`, `Update.counts`), found in the same pass over memory.
    """

    kind: str
    """A key of KINDS."""
    body: fx.Graph
    """Placeholders: `inputs`, then `index` if the update draws random bits, then the entries of the scalar vector, then
    `numbers`."""
    inputs: tuple[str, ...]
    """Keys of what it reads: components as they were before the step, and results of earlier stages."""
    outputs: tuple[str, ...]
    """Parameter-shaped results, in order: new components, and values that only later stages read."""
    reduced: tuple[str, ...] = ()
    """Names of small tensors that it returns after those: of a joined stage, the new values of states of one number."""
    numbers: tuple[str, ...] = ()
    """Small tensors of earlier stages that it reads, one number for each parameter; or states of one number."""

    @cached_property
    def graph(self) -> fx.GraphModule:
        """The body as a module that can be called; made when first asked for."""
        return fx.GraphModule(torch.nn.Module(), self.body)

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes that it returns, in the order of what it gives."""
        return tuple(returned(self.body))

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of all that it returns."""
        return (*self.outputs, *self.reduced)

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join([*self.inputs, *self.numbers])} -> {', '.join(self.gives)}"
