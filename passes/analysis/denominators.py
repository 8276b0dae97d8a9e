"""Where a small error of a value becomes a large one: under roots and divisions, and what these are computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten

_ROOTS = {aten.sqrt.default: 0, aten.rsqrt.default: 0, aten.reciprocal.default: 0, aten.exp.default: 0,
          aten.div.Tensor: 1, aten.addcdiv.default: 2, aten.atan2.default: 1, aten.pow.Tensor_Tensor: 0,
          aten.pow.Scalar: 1}  # fmt: skip
"""Operations that may turn a small error of one operand into a large one of the result: the operand's index."""

_ELSEWHERE = {aten.sign, aten.sgn, aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne,
              aten.isnan, aten.isinf}  # fmt: skip
"""Operations whose result does not depend on the size of an operand, only on its sign or order."""


def denominator(node: fx.Node) -> Any:
    """The operand of which a node takes the root, or by which it divides."""
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[0] if node.args[1] < 0 or node.args[1] % 1 else None  # type: ignore[operator]  # an exponent
    return node.args[_ROOTS[node.target]] if node.target in _ROOTS else None


def ancestors(nodes: list[fx.Node], ends: Callable[[fx.Node], Any]) -> list[fx.Node]:
    """The nodes and all that they are computed from; the search does not pass nodes for which `ends` is true."""
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            passed = not ends(node) and getattr(node.target, "overloadpacket", None) not in _ELSEWHERE
            todo += _passed(node) if passed else []
    return list(found)


def _passed(node: fx.Node) -> list[fx.Node]:
    """The operands on whose size the result depends: not the mask of a `where`."""
    return [x for x in node.all_input_nodes if node.target is not aten.where.self or x is not node.args[0]]
