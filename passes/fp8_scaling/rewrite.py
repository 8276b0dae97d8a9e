"""Rewrites the matmuls that a plan has marked: scale, round, multiply, scale back.

Given:
    mm = aten.mm(a, b)

Result:
    wide = widen(a);  scaled = wide * scale_a;  rounded = cast(scaled, "e4m3")        and so for b
    mm = result(dot(rounded_a, rounded_b, "e4m3", "e4m3") * (inverse_a * inverse_b), None, bfloat16)

The scales are elements of the first input, `powers`: float32[2, operands], scales and their inverses.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_neuron.numerics.eft import widen
from collage_neuron.passes.fp8_scaling.plan import MARK, PRODUCTS, Operand, factors, results_of
from collage_neuron.passes.fp8_scaling.scaled_matmul import amax_powers, cast, dot, measure, result


@dataclass
class Rewritten:
    """A graph with matmuls in 8 bits."""

    module: GraphModule
    names: Sequence[str]
    """The operands whose scales are in `powers`, in order."""


@dataclass
class _Rewriter:
    """Writes one graph; the values that were cast already are cast once."""

    graph: Graph
    places: Mapping[str, int]
    """Of operands in `powers`, by name."""
    scales: Node
    wanted: Sequence[str]
    unsteady: Set[str]
    measured: dict[str, Node] = field(default_factory=dict)
    cast: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    found: dict[str, tuple[Node, Node]] = field(default_factory=dict)

    def call(self, target: object, *args: object) -> Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]  # functions of ours

    def powers(self, wide: Node, operand: Operand) -> tuple[Node, Node]:
        """The scale of an operand and its inverse; once for all values with the same elements."""
        if operand.name not in self.found:
            if operand.is_known and operand.name not in self.unsteady:
                # `powers` is flat: all scales, and then the inverse of each.
                both, at, n = self.scales, self.places[operand.name], len(self.places)
            else:
                both, at, n = self.call(amax_powers, wide, operand.fmt), 0, 1
            self.found[operand.name] = self.call(operator.getitem, both, at), self.call(operator.getitem, both, at + n)
        return self.found[operand.name]

    def rounded(self, x: Node, operand: Operand) -> tuple[Node, Node]:
        """An operand in 8 bits, and the inverse of its scale."""
        if x not in self.cast:
            wide = self.call(widen, x)
            scale, inverse = self.powers(wide, operand)
            scaled = self.call(torch.mul, wide, scale)
            found = self.call(cast, scaled, operand.fmt)
            if operand.name in self.wanted and operand.name not in self.measured:
                self.measured[operand.name] = self.call(measure, wide, scale, found, operand.fmt)
            self.cast[x] = found, inverse
        return self.cast[x]

    def rewrite(self, node: Node) -> None:
        """Replaces one matmul."""
        a, b = factors(node)
        of_a, of_b = node.meta[MARK]
        bias = node.args[0] if PRODUCTS[node.target] else None
        with self.graph.inserting_before(node):
            (qa, ia), (qb, ib) = self.rounded(a, of_a), self.rounded(b, of_b)
            unscaled = self.call(torch.mul, self.call(dot, qa, qb, of_a.fmt, of_b.fmt), self.call(torch.mul, ia, ib))
            out = self.call(result, unscaled, bias, node.meta["val"].dtype)
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        self.graph.erase_node(node)


def rewrite(module: GraphModule, measured: Sequence[str] = (), unsteady: Set[str] = frozenset()) -> Rewritten:
    """A copy of a graph with its marked matmuls rewritten.

    With names of operands in `measured`, a last output has what `measure` gives of each. Those in `unsteady` take their
    largest magnitude, as those of unknown size do.
    """
    graph = Graph()
    copied: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    # An output of the forward half that the backward half reads is an input there, and still carries the mark.
    marked = [n for n in graph.nodes if MARK in n.meta and n.target in PRODUCTS]
    operands = [o for n in marked for o in n.meta[MARK]]
    names = list(dict.fromkeys(o.name for o in operands if o.is_known))
    output = graph.output(copied[0])
    with graph.inserting_before(next(iter(graph.nodes))):
        powers = graph.placeholder("powers")
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        scales = graph.call_function(torch.unbind, (graph.call_function(torch.flatten, (powers,)),))
    writer = _Rewriter(graph, {name: i for i, name in enumerate(names)}, scales, measured, unsteady)
    for node in marked:
        writer.rewrite(node)
    if measured:
        with graph.inserting_before(output):
            seen = writer.call(torch.stack, [writer.measured[name] for name in measured])
        output.args = ([*results_of(output), seen],)
    return Rewritten(GraphModule(module, graph), names)
