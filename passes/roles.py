"""Which states are running sums or averages of squares, seen from the graph: those are what `plus` expands.

At a decay near 1 such a state moves by less than half an ulp of bf16 a step, and stalls; a first moment, whose
decay is around 0.9, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx

aten = torch.ops.aten

_FIRST_TERM = {
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default,
    aten._to_copy.default, aten.addcmul.default, aten.addcdiv.default,
}  # fmt: skip
"""Operations through which the sum that their first operand is stays a sum."""

_TWO_TERMS = {
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.lerp.Scalar, aten.lerp.Tensor, aten.rsub.Scalar,
}  # fmt: skip


def square_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states of a captured update that accumulate a square."""
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    assert isinstance(outputs, dict)
    return frozenset(name for name, node in outputs.items() if name != "param" and any(map(_is_square, _terms(node))))


def _terms(node: Any) -> Iterator[fx.Node]:
    """The terms of the sum that `node` is, scaled or not."""
    if not isinstance(node, fx.Node):
        return
    yield node
    if node.target in _TWO_TERMS:
        yield from _terms(node.args[0])
        yield from _terms(node.args[1])
    elif node.target in _FIRST_TERM and not _is_square(node):
        yield from _terms(node.args[0])
        if len(node.args) > 1 and node.target in (aten.mul.Tensor, aten.mul.Scalar) and _is_scalar(node.args[0]):
            yield from _terms(node.args[1])


def _is_scalar(x: Any) -> bool:
    return not isinstance(x, fx.Node) or (x.op == "placeholder" and str(x.target)[1:].isdigit())


_SQUARES: dict[object, Callable[[fx.Node], bool]] = {
    aten.mul.Tensor: lambda n: n.args[0] is n.args[1],
    aten.addcmul.default: lambda n: n.args[1] is n.args[2],
    aten.pow.Tensor_Scalar: lambda n: bool(n.args[1] == 2),
    aten.square.default: lambda n: True,
}


def _is_square(node: fx.Node) -> bool:
    test: Callable[[fx.Node], bool] | None = _SQUARES.get(node.target)
    return test is not None and test(node)
