"""Averages of the parameter: copies of it, and states that mix it with what they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.analysis.polynomials import ONE, Product, Sum
from collage_neuron.passes.analysis.value_numbering import Values

aten = torch.ops.aten


class Precise:
    """Finds averages of the parameter, or of states in `found`, whatever is added to these in the same step."""

    def __init__(self, graph: fx.Graph, outputs: Mapping[str, Any], found: frozenset[str]) -> None:
        named: dict[fx.Node, str] = {outputs[name]: name for name in found}
        named |= dict.fromkeys(spine(graph), "param") | {outputs["param"]: "param"}
        self.outputs, self.values = outputs, Values(graph, named | copies(graph, named))
        self.precise = {self._product(name) for name in ("param", COPY, *found)}

    def _product(self, name: str) -> Product:
        ((product, _),) = self.values.atom("input", name=name).items()
        return product

    def is_average(self, name: str) -> bool:
        """Returns True if the state `name` is such an average, or is the parameter plus something."""
        own = self._product(name)
        found = self.values.alternatives(self.values.of[self.outputs[name]])
        return any(self._is_average(x, own, self.precise - {own}) for x in found if x != {own: 1.0})

    def _is_average(self, x: Sum, own: Product, precise: set[Product]) -> bool:
        if precise.isdisjoint(x):
            return False
        added = own not in x and sum(x.get(p) or 0 for p in precise) == 1
        return added or all(p in precise | {ONE, own} or not self.values.support(p) for p in x)


COPY = "copy of param"


def copies(graph: fx.Graph, named: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Copies of the parameter, as separate values: a new state may start as a copy and differ from it later."""
    copies = {n: original(n) for n in graph.nodes if n not in named and original(n) is not n}
    return {n: COPY for n, of in copies.items() if named.get(of) == "param" or is_placeholder(of, "param")}


def original(node: fx.Node) -> fx.Node:
    """The node that a node is a copy of, or the node itself."""
    while node.target in (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.copy.default):
        node = node.args[1 if node.target is aten.copy.default else 0]  # type: ignore[assignment]  # a node
    return node


def is_placeholder(node: Any, name: str) -> bool:
    """Returns True for the input of a captured graph called `name`."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.target == name
