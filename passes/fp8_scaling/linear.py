"""Finds the matmuls of linear layers in a forward graph, or in a joint one of forward and backward.

A matmul belongs to the layer of a parameter if it reads the parameter (the output of the layer, and the gradient of its
input), or if its result becomes the parameter's gradient. All others, the products of attention, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from collage_neuron.passes.fp8_scaling.sizes import packet

aten: Any = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Operations that a linear layer becomes, with the index of the first factor."""

SAME_ELEMENTS = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.clone, aten.detach, aten.alias, aten._to_copy),
}
"""Operations whose results have all elements of the operand once, perhaps in another dtype."""

GATHERS = SAME_ELEMENTS | {aten.add}
"""Operations between a matmul and the gradient that it is part of: a parameter used twice gets a sum."""


@dataclass(frozen=True)
class Joint:
    """The nodes of a graph by their roles."""

    parameters: Mapping[Node, str]
    """The inputs that are parameters, with their names."""
    gradients: Mapping[Node, str]
    """The outputs that are gradients of parameters, with their names."""
    backward: frozenset[Node]
    """Values that depend on the gradient of an output."""
    nodes: Sequence[Node]


@dataclass(frozen=True)
class Product:
    """A matmul of a linear layer."""

    node: Node
    parameter: str
    role: str
    """`output`, `input gradient` or `weight gradient`."""


def factors(node: Node) -> Sequence[Any]:
    """The operands of a matmul, without the bias."""
    first = PRODUCTS[node.target]
    return node.args[first : first + 2]


def source(x: Any) -> Any:
    """The value whose elements `x` has, in another shape or dtype."""
    while isinstance(x, Node) and packet(x) in SAME_ELEMENTS and not _bits(x):
        x = x.args[0]
    return x


def _bits(x: Node) -> bool:
    return any(isinstance(a, torch.dtype) for a in x.args)


def depending_on(starts: Iterable[Node], nodes: Sequence[Node]) -> frozenset[Node]:
    """The values that are computed from `starts`, these included."""
    found = set(starts)
    for node in nodes:
        if any(x in found for x in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def products(joint: Joint) -> Iterator[Product]:
    """The matmuls of linear layers, in order; without those that also scale what they add (`alpha`, `beta`)."""
    gradient_of = _gradient_matmuls(joint)
    for node in joint.nodes:
        if node.target not in PRODUCTS or node.kwargs:
            continue
        owners = [joint.parameters[s] for s in map(source, factors(node)) if s in joint.parameters]
        if len(owners) == 1:
            yield Product(node, owners[0], "input gradient" if node in joint.backward else "output")
        elif node in gradient_of and not owners:
            yield Product(node, gradient_of[node], "weight gradient")


def _gradient_matmuls(joint: Joint) -> dict[Node, str]:
    """The matmuls whose results are added up to the gradient of a parameter, with its name."""
    found: dict[Node, str] = {}
    for gradient, name in joint.gradients.items():
        waiting = [gradient]
        while waiting:
            node = waiting.pop()
            if node.target in PRODUCTS:
                found[node] = name
            elif packet(node) in GATHERS:
                waiting += [x for x in node.all_input_nodes if x in joint.backward]
    return found


def last(found: Sequence[Product], nodes: Sequence[Node]) -> set[str]:
    """The parameters of the layers whose output no other linear layer reads: the heads."""
    outputs = [p for p in found if p.role == "output"]
    reading = {p.node for p in outputs}
    return {p.parameter for p in outputs if not (depending_on([p.node], nodes) & reading) - {p.node}}


def results_of(node: Node) -> list[Any]:
    """What an output node returns, in order, with None for absent gradients."""
    flat: list[Any] = []
    waiting: list[Any] = [node.args[0]]
    while waiting:
        x = waiting.pop(0)
        waiting[:0] = list(x) if isinstance(x, (list, tuple)) else []
        flat += [] if isinstance(x, (list, tuple)) else [x]
    return flat
