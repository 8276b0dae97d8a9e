"""Our own operations of a graph in terms of torch's, so that running it is calling torch and nothing else.

Given::

    round_to = round_to(add, 'bf16')
    narrow = narrow(round_to, 'bf16')

Result::

    to = add.to(torch.bfloat16);  to_1 = to.to(torch.float32)
    # what was only widened is stored as it was: `to`, and not to_1.to(torch.bfloat16)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import capped, narrow, round_to, sqrt, whole, widen

INLINED = frozenset({capped, narrow, round_to, sqrt, whole, widen})
"""Those that are chains of methods of one tensor."""


def inlined(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, with the methods of tensors that each operation of `INLINED` calls in its place."""
    graph = fx.Graph()
    made: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.target in INLINED:
            value, *rest = fx.node.map_arg(node.args, made.__getitem__)
            made[node] = node.target(_Written(graph, value), *rest).node
        else:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


class _Written:
    """Stands for a tensor whose methods are written to a graph instead of being called."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):  # torch asks whether it has a way of its own with torch's functions
            raise AttributeError(method)

        def call(*args: Any, **kwargs: Any) -> _Written:
            if method == "to" and (narrow := _widened(self.node)) is not None and args == narrow.args[1:]:
                return _Written(self.graph, narrow)
            return _Written(self.graph, self.graph.call_method(method, (self.node, *args), kwargs))

        return call


def _widened(node: fx.Node) -> fx.Node | None:
    """The cast of which `node` is the result, widened to fp32; None if it is anything else."""
    before = node.args[0] if (node.op, node.target) == ("call_method", "to") else None
    if not isinstance(before, fx.Node) or (before.op, before.target) != ("call_method", "to"):
        return None
    is_exact = before.args[1].itemsize <= 2  # type: ignore[union-attr]  # fp32 holds all numbers of such a type
    return before if is_exact and node.args[1:] == (torch.float32,) else None
