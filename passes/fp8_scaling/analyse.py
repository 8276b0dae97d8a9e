"""Infers the size of every value of a graph from those of its inputs."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.fx import Graph, Node

from collage_neuron.passes.fp8_scaling import rules as rules  # which fill the table
from collage_neuron.passes.fp8_scaling.sizes import RULES, Operands, Size, Sizes, Unknown


def analyse(graph: Graph, given: Mapping[Node, Size]) -> dict[Node, Sizes]:
    """The sizes of all values that follow from `given`, the sizes of some inputs; unknown ones are missing."""
    found: dict[Node, Sizes] = dict(given)
    for node in graph.nodes:
        if node.op == "call_function" and node not in found:
            with suppress(Unknown):
                found[node] = _size(node, found)
    return found


def _size(node: Node, found: dict[Node, Sizes]) -> Sizes:
    if node.target is operator.getitem:
        several: Any = found.get(node.args[0]) if isinstance(node.args[0], Node) else None
        index: Any = node.args[1]
        if not isinstance(several, tuple) or isinstance(several, Size) or len(several) <= index:
            raise Unknown
        size: Size = several[index]
        return size
    rule = RULES.get(packet(node))
    if rule is None:
        raise Unknown
    return rule(Operands(node, found))


def packet(node: Node) -> Any:
    """The operation of a node, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def known(size: Sizes | None) -> bool:
    """Returns True for the size of one value that is neither unknown nor zero nor infinite."""
    return isinstance(size, Size) and math.isfinite(size.log)


def reason(node: Node, found: Mapping[Node, Sizes]) -> str:
    """Why the size of a value is not known: the operations before it that have no rule, or are of no known size."""
    waiting, seen, named = [node], {node}, []
    while waiting:
        x = waiting.pop()
        if x.op == "call_function" and x.target is not operator.getitem and packet(x) not in RULES:
            named.append(str(packet(x)))
        before = [y for y in x.all_input_nodes if y not in seen and not known(found.get(y))]
        seen.update(before)
        waiting += before
    if named:
        return f"{', '.join(sorted(set(named)))} has no rule"
    return "it is computed from zeros, or from values whose size is not known"
