"""One node of explicit-rounding form as HLO, with roundings as reduce-precision, or by bits (`compilers`).

XLA may keep excess precision through a pair of converts, never through reduce-precision.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import (
    LARGEST,
    block_max,
    capped,
    narrow,
    round_to,
    shift_right,
    sqrt,
    stochastic_round,
    whole,
    widen,
)
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.backends.xla.bits import ON_BITS
from collage_neuron.passes.backends.xla.blocks import lower_block_max
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape

_PLAIN: Mapping[Any, str] = {
    operator.add: "add", operator.sub: "subtract", operator.mul: "multiply", operator.truediv: "divide",
    operator.neg: "negate", sqrt: "sqrt", torch.abs: "abs", torch.sign: "sign",
    torch.maximum: "maximum", torch.minimum: "minimum", torch.where: "select",
    torch.logical_or: "or", torch.logical_and: "and", torch.logical_not: "not",
    torch.exp: "exponential", torch.log: "log", torch.pow: "power",
    operator.xor: "xor", operator.and_: "and", operator.or_: "or",
    operator.lshift: "shift-left", shift_right: "shift-right-logical",
}  # fmt: skip

_COMPARISONS: Mapping[Any, str] = {
    operator.lt: "LT", operator.le: "LE", operator.gt: "GT", operator.ge: "GE", operator.eq: "EQ", operator.ne: "NE",
}  # fmt: skip


def lower_node(
    hlo: Computation, node: fx.Node, values: Mapping[fx.Node, Instruction], dims: tuple[int, ...]
) -> Instruction:
    """The node, whose inputs have these values, all of shape `dims`."""
    if node.target is round_to:
        return _round_to(hlo, _operand(hlo, node.args[0], values, dims), str(node.args[1]), dims)
    if node.target in ON_BITS or node.target is block_max:
        write = ON_BITS.get(node.target, lower_block_max)
        return write(hlo, *(values[x] if isinstance(x, fx.Node) else x for x in node.args))
    element = "s32" if any(values[x].shape == Shape("s32", dims) for x in node.all_input_nodes) else "f32"
    operands = [_operand(hlo, x, values, dims, element) for x in node.args if not isinstance(x, str)]
    if node.target is stochastic_round:
        return _stochastic_round(hlo, dims, *operands)
    if node.target is capped:  # a NaN in the first operand stays, see _keeping_nan
        return hlo.add("minimum", operands[0].shape, [*operands, hlo.broadcast(hlo.constant(LARGEST), dims)])
    if node.target is operator.add and element == "s32":
        return hlo.wrapping_sum(*operands)
    if node.target is whole:
        return hlo.add("convert", Shape("s32", dims), operands)
    if node.target in _COMPARISONS:
        return hlo.compare(_COMPARISONS[node.target], *operands)
    if node.target is widen or node.target is narrow:
        shape = Shape("f32" if node.target is widen else storage_named(node.args[1]).hlo, dims)
        return operands[0] if operands[0].shape == shape else hlo.add("convert", shape, operands)
    result = hlo.add(_PLAIN[node.target], operands[-1].shape, operands)
    return _keeping_nan(hlo, operands[1], result) if node.target in (torch.maximum, torch.minimum) else result


def _round_to(hlo: Computation, x: Instruction, fmt: str, dims: tuple[int, ...]) -> Instruction:
    """`eft.round_to`: an instruction that XLA may not delete, unlike a pair of converts."""
    storage = storage_named(fmt)
    if storage.precision is not None:
        if storage.largest is not None:
            x = _limited(hlo, x, (-storage.largest, storage.largest), dims)
        return reduced(hlo, x, *storage.precision)
    return _limited(hlo, hlo.round_nearest_even(x), storage.limits, dims)


def _limited(hlo: Computation, x: Instruction, limits: tuple[float, float], dims: tuple[int, ...]) -> Instruction:
    low, high = (hlo.broadcast(hlo.constant(limit), dims) for limit in limits)
    return hlo.add("clamp", x.shape, [low, x, high])


def reduced(hlo: Computation, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
    """x rounded to a floating-point type. Reduce-precision makes its subnormals 0, so they are rounded as integers."""
    rounded = hlo.reduce_precision(x, exponent_bits, mantissa_bits)
    if exponent_bits == 8:
        return rounded
    least = 2.0 ** (2 - 2 ** (exponent_bits - 1))  # the smallest normal number
    unit, dims = least * 2.0**-mantissa_bits, x.array.dims
    up, down, limit = (hlo.broadcast(hlo.constant(c), dims) for c in (1 / unit, unit, least))
    whole_number = hlo.round_nearest_even(hlo.add("multiply", x.shape, [x, up]))
    subnormal = hlo.add("multiply", x.shape, [whole_number, down])
    is_small = hlo.compare("LT", hlo.add("abs", x.shape, [x]), limit)
    return hlo.add("select", x.shape, [is_small, subnormal, rounded])


def _keeping_nan(hlo: Computation, second: Instruction, result: Instruction) -> Instruction:
    """Keeps a NaN in the second operand, which XLA's CPU maximum and minimum lose; torch keeps NaN in either."""
    return hlo.add("select", result.shape, [hlo.compare("NE", second, second), second, result])


def _stochastic_round(hlo: Computation, dims: tuple[int, ...], x: Instruction, random: Instruction) -> Instruction:
    """`eft.stochastic_round`, in the same operations on bits."""
    bits = hlo.add("bitcast-convert", random.shape, [x])
    upper = hlo.broadcast(hlo.constant(-0x10000, "s32"), dims)
    carried = hlo.add("and", random.shape, [hlo.wrapping_sum(bits, random), upper])
    rounded = hlo.add("bitcast-convert", x.shape, [carried])
    nearest = _round_to(hlo, x, "bf16", dims)
    return hlo.add("select", x.shape, [hlo.compare("EQ", x, x), rounded, nearest])


def _operand(
    hlo: Computation, x: Any, values: Mapping[fx.Node, Instruction], dims: tuple[int, ...], element: str = "f32"
) -> Instruction:
    """An operand; a literal becomes a constant of the element type `element`."""
    return values[x] if isinstance(x, fx.Node) else hlo.broadcast(hlo.constant(float(x), element), dims)
