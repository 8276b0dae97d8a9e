"""Finds the spine: the chain of operations that turns the old parameter into the new one.

Only on the spine does `p * s` mean a decay, `p + p * (s - 1)`, and `p + u` an accumulation. Elsewhere (`g + p * wd`)
the parameter is an operand like any other.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.passes.ir.stage import returned

aten = torch.ops.aten

_FIRST = {
    aten.sub.Tensor, aten.sub.Scalar, aten.add.Scalar, aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar,
    aten.lerp.Scalar, aten.lerp.Tensor, aten.addcmul.default, aten.addcdiv.default, aten.neg.default,
    aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default,
    aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.index_put.default,
}  # fmt: skip
_BOTH = {aten.mul.Tensor, aten.maximum.default, aten.minimum.default}


def spine(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes of the shortest path from the placeholder `param` to the output `param` of a captured update."""
    outputs = returned(graph)
    assert isinstance(outputs, dict)
    if "param" not in outputs:  # a part of an update
        return frozenset()
    start: Any = outputs["param"]
    # Breadth first: of several paths the shortest is the spine.
    met, ways = {start}, deque[tuple[Any, ...]]([(start,)])
    while ways:
        way = ways.popleft()
        node = way[-1]
        if node.op == "placeholder" and node.target == "param":
            return frozenset(way)
        further = [x for x in _carriers(node) if isinstance(x, fx.Node) and x not in met]
        met.update(further)
        ways += ((*way, x) for x in dict.fromkeys(further))
    return frozenset()


def _carriers(node: fx.Node) -> tuple[Any, ...]:
    """The operands of which the result of `node` is an updated value."""
    if node.target in _FIRST or (node.target is aten.add.Tensor and (node.kwargs or len(node.args) > 2)):
        return node.args[:1]
    if node.target in _BOTH or node.target is aten.add.Tensor:
        return node.args[:2]
    if node.target is aten.where.self:
        return node.args[1:]
    return node.args[1:2] if node.target is aten.copy.default else ()
