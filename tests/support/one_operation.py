"""Captured updates of one operation each, one for each operation with a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from updates import rewritten

from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify

aten = torch.ops.aten

Body = Callable[[fx.Graph, fx.Node, fx.Node, fx.Node, fx.Node], fx.Node]
"""Writes an operation on (param, grad, state, slot 0) into a captured graph."""


def op(target: Any, *pattern: Any, **kwargs: Any) -> Body:
    """`target` on the operands that `pattern` names.

    "x" is the state, "g" the gradient, "p" the parameter, "s" slot 0; or another operation, a list, a constant.
    """

    def write(graph: fx.Graph, p: fx.Node, g: fx.Node, x: fx.Node, s: fx.Node) -> fx.Node:
        named = {"p": p, "g": g, "x": x, "s": s}

        def operand(a: Any) -> Any:
            if isinstance(a, list):
                return [operand(b) for b in a]
            return a(graph, p, g, x, s) if callable(a) else named.get(a, a)

        return graph.call_function(target, tuple(map(operand, pattern)), {k: operand(v) for k, v in kwargs.items()})

    return write


ABOVE = op(aten.gt.Scalar, "p", 1.0)


BELOW = op(aten.lt.Scalar, "g", 0.25)
"""Masks, each true for about half of the elements; of plain values, which every arithmetic reads whole."""


SLOT = 0.1
"""The number of the scalar plane; not representable in any format."""


ONE_OP: dict[str, Body] = {
    "add": op(aten.add.Tensor, "x", "g"),
    "add_alpha": op(aten.add.Tensor, "x", "g", alpha="s"),
    "add_state_second": op(aten.add.Tensor, "g", "x"),
    "add_scalar": op(aten.add.Tensor, "x", "s"),
    "sub": op(aten.sub.Tensor, "x", "g"),
    "sub_alpha": op(aten.sub.Tensor, "x", "g", alpha="s"),
    "rsub": op(aten.rsub.Scalar, "x", "s"),
    "mul_scalar": op(aten.mul.Tensor, "x", "s"),
    "mul": op(aten.mul.Tensor, "x", "g"),
    "div": op(aten.div.Tensor, "x", "g"),
    "addcmul": op(aten.addcmul.default, "x", "g", "g", value="s"),
    "addcdiv": op(aten.addcdiv.default, "x", "g", "p", value="s"),
    "lerp": op(aten.lerp.Scalar, "x", "g", "s"),
    "lerp_of_states": op(aten.lerp.Scalar, "x", op(aten.add.Tensor, "x", "g"), "s"),
    "lerp_by_elements": op(aten.lerp.Tensor, "x", "g", op(aten.mul.Tensor, "p", "p")),
    "neg": op(aten.neg.default, "x"),
    "abs": op(aten.abs.default, "x"),
    "sign": op(aten.sign.default, "x"),
    "sqrt": op(aten.sqrt.default, "x"),
    "rsqrt": op(aten.rsqrt.default, "x"),
    "reciprocal": op(aten.reciprocal.default, "x"),
    "square": op(aten.pow.Tensor_Scalar, "x", 2),
    "maximum": op(aten.maximum.default, "x", "g"),
    "minimum": op(aten.minimum.default, "x", "g"),
    "clamp": op(aten.clamp.default, "x", "s", "s"),
    "clamp_min": op(aten.clamp_min.Tensor, "x", "p"),
    "clamp_max": op(aten.clamp_max.Tensor, "x", "p"),
    "exp": op(aten.exp.default, "x"),
    "log": op(aten.log.default, "x"),
    "cube": op(aten.pow.Tensor_Scalar, "x", 3),
    "square_op": op(aten.square.default, "x"),
    "where": op(aten.where.self, ABOVE, "x", "p"),
    "masked_fill": op(aten.masked_fill.Scalar, "x", ABOVE, "s"),
    "index_put": op(aten.index_put.default, "x", [ABOVE], "s"),
    "mask_as_number": op(aten.mul.Tensor, op(aten._to_copy.default, ABOVE, dtype=torch.float32), "x"),
    "mask_and": op(aten.where.self, op(aten.logical_and.default, ABOVE, BELOW), "x", "g"),
    "mask_or": op(aten.where.self, op(aten.logical_or.default, ABOVE, op(aten.eq.Tensor, "g", "p")), "x", "g"),
    "mask_ge": op(aten.where.self, op(aten.ge.Scalar, "p", 1.0), "x", "g"),
    "mask_le": op(aten.where.self, op(aten.le.Scalar, "p", 1.0), "x", "g"),
    "mask_ne": op(aten.where.self, op(aten.ne.Tensor, "p", "g"), "x", "g"),
    "mask_not": op(aten.where.self, op(aten.logical_not.default, ABOVE), "x", "g"),
    "zeros": op(aten.sub.Tensor, "x", op(aten.zeros_like.default, "x")),
    "ones": op(aten.sub.Tensor, "x", op(aten.mul.Tensor, op(aten.ones_like.default, "x"), "g")),
    "full": op(aten.add.Tensor, op(aten.full_like.default, "x", 0.25), "x"),
    "sigmoid": op(aten.sigmoid.default, "x"),
    "softplus": op(aten.softplus.default, "x", 2.0, 2.5),
    "atan2": op(aten.atan2.default, "x", "g"),
    "nan_to_num": op(aten.nan_to_num.default, "x", 0.5),
    "mask_nan": op(aten.where.self, op(aten.isnan.default, "x"), "g", "x"),
    "mask_inf": op(aten.where.self, op(aten.isinf.default, "x"), "g", "x"),
    "fill": op(aten.add.Tensor, op(aten.fill.Scalar, "x", "s"), "g"),
    "new_full": op(aten.add.Tensor, op(aten.new_full.default, "x", [4096], 0.25), "x"),
    "clone": op(aten.clone.default, "x"),
    "copy": op(aten.copy.default, "x", "g"),
}
"""An update `state <- operation` for each operation with a rule."""


def captured(body: Body) -> Captured:
    graph = fx.Graph()
    p, g, x, s = (graph.placeholder(name) for name in ("param", "grad", "state", "s0"))
    graph.output({"param": p, "state": body(graph, p, g, x, s)})
    return Captured(graph, ("state",), {}, graph.python_code("self").src)


def expanded(name: str, arithmetic: str, state: str) -> Update:
    formats = {"param": format_named("bf16"), "state": format_named(state)}
    update = rewritten(captured(ONE_OP[name]), formats, arithmetic)
    verify(update)
    return update
