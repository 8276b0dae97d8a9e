"""One node of explicit-rounding form as HLO, with roundings as reduce-precision, or by bits (`compilers`).

XLA may keep excess precision through a pair of converts, never through reduce-precision. Words that the elements of a
block share are expanded when they are read, and sliced when they are stored. A block is k consecutive elements of a
row, the last dimension; the last block of a row may be shorter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.numerics import eft
from collage_neuron.numerics.eft import storage_named
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape

_PLAIN: Mapping[Any, str] = {
    operator.add: "add", operator.sub: "subtract", operator.mul: "multiply", operator.truediv: "divide",
    operator.neg: "negate", eft.sqrt: "sqrt", torch.abs: "abs", torch.sign: "sign",
    torch.maximum: "maximum", torch.minimum: "minimum", torch.where: "select",
    torch.logical_or: "or", torch.logical_and: "and", torch.logical_not: "not",
    torch.exp: "exponential", torch.log: "log", torch.pow: "power",
    operator.xor: "xor", operator.and_: "and", operator.or_: "or",
    operator.lshift: "shift-left", eft.shift_right: "shift-right-logical",
}  # fmt: skip

_COMPARISONS: Mapping[Any, str] = {
    operator.lt: "LT", operator.le: "LE", operator.gt: "GT", operator.ge: "GE", operator.eq: "EQ", operator.ne: "NE",
}  # fmt: skip

_MAGNITUDE, _UPPER, _LOWER, _LOWER_SIGN = 0x7FFFFFFF, -0x10000, 0xFFFF, 0x8000
"""Masks of the bits of an fp32 number: all but its sign, both halves, and the first bit of the lower one."""


def lower_node(
    hlo: Computation, node: fx.Node, values: Mapping[fx.Node, Instruction], dims: tuple[int, ...]
) -> Instruction:
    """The node, whose inputs have these values, all of shape `dims`."""
    if node.target is eft.round_to:
        return _round_to(hlo, _operand(hlo, node.args[0], values, dims), str(node.args[1]))
    if node.target in ON_BITS:
        return ON_BITS[node.target](hlo, *(values[x] if isinstance(x, fx.Node) else x for x in node.args))
    element = "s32" if any(values[x].shape == Shape("s32", dims) for x in node.all_input_nodes) else "f32"
    operands = [_operand(hlo, x, values, dims, element) for x in node.args if not isinstance(x, str)]
    if node.target is eft.stochastic_round:
        return _stochastic_round(hlo, *operands)
    if node.target is eft.capped:  # a NaN in the first operand stays, see _keeping_nan
        return hlo.on("minimum", operands[0], eft.LARGEST)
    if node.target is operator.add and element == "s32":
        return hlo.wrapping_sum(*operands)
    if node.target is eft.whole:
        return hlo.add("convert", Shape("s32", dims), operands)
    if node.target in _COMPARISONS:
        return hlo.compare(_COMPARISONS[node.target], *operands)
    if node.target is eft.widen or node.target is eft.narrow:
        shape = Shape("f32" if node.target is eft.widen else storage_named(node.args[1]).hlo, dims)
        return operands[0] if operands[0].shape == shape else hlo.add("convert", shape, operands)
    result = hlo.add(_PLAIN[node.target], operands[-1].shape, operands)
    return _keeping_nan(hlo, operands[1], result) if node.target in (torch.maximum, torch.minimum) else result


def _operand(
    hlo: Computation, x: Any, values: Mapping[fx.Node, Instruction], dims: tuple[int, ...], element: str = "f32"
) -> Instruction:
    """An operand; a literal becomes a constant of the element type `element`."""
    return values[x] if isinstance(x, fx.Node) else hlo.broadcast(hlo.constant(float(x), element), dims)


# Roundings ---------------------------------------------------------------------------------------------------------


def _round_to(hlo: Computation, x: Instruction, fmt: str) -> Instruction:
    """`eft.round_to`: an instruction that XLA may not delete, unlike a pair of converts."""
    storage = storage_named(fmt)
    if storage.precision is not None:
        if storage.largest is not None:
            # Saturated before, since reduce-precision makes an infinity of what is too large.
            x = _limited(hlo, x, (-storage.largest, storage.largest))
        return reduced(hlo, x, *storage.precision)
    return _limited(hlo, hlo.round_nearest_even(x), storage.limits)


def _limited(hlo: Computation, x: Instruction, limits: tuple[float, float]) -> Instruction:
    low, high = (hlo.like(x, limit) for limit in limits)
    return hlo.add("clamp", x.shape, [low, x, high])


def reduced(hlo: Computation, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
    """x rounded to a floating-point type."""
    rounded = hlo.reduce_precision(x, exponent_bits, mantissa_bits)
    if exponent_bits == 8:
        return rounded
    least = 2.0 ** (2 - 2 ** (exponent_bits - 1))  # the smallest normal number
    # Reduce-precision makes 0 of subnormal results: these are rounded as multiples of the smallest one instead.
    unit = least * 2.0**-mantissa_bits
    subnormal = hlo.on("multiply", hlo.round_nearest_even(hlo.on("multiply", x, 1 / unit)), unit)
    return hlo.select(hlo.compare("LT", hlo.on("abs", x), least), subnormal, rounded)


def _keeping_nan(hlo: Computation, second: Instruction, result: Instruction) -> Instruction:
    # Maximum and minimum of XLA's CPU lose a NaN in the second operand; torch keeps one in either.
    return hlo.select(hlo.compare("NE", second, second), second, result)


def _stochastic_round(hlo: Computation, x: Instruction, random: Instruction) -> Instruction:
    """`eft.stochastic_round`, in the same operations on bits."""
    carried = hlo.on("and", hlo.wrapping_sum(hlo.bits(x), random), _UPPER)
    # A carry may make an infinity of a NaN, so that is rounded to nearest.
    return hlo.select(hlo.compare("EQ", x, x), hlo.from_bits(carried), _round_to(hlo, x, "bf16"))


# Bits: each function is the one of the same name of `numerics.eft` ---------------------------------------------------


def _power_of_two(hlo: Computation, x: Instruction) -> Instruction:
    return hlo.from_bits(hlo.on("and", hlo.bits(x), eft.EXPONENT))


def _inverse_power_of_two(hlo: Computation, x: Instruction) -> Instruction:
    return hlo.from_bits(hlo.on("xor", hlo.on("and", hlo.bits(x), eft.EXPONENT), eft.EXPONENT))


def _lower_half(hlo: Computation, x: Instruction) -> Instruction:
    """The lower 16 bits of fp32 numbers, as signed numbers."""
    # Flipping the first of 16 bits and subtracting it extends the sign, by numbers that fp32 has exactly (`compilers`).
    half = hlo.on("and", hlo.bits(x), _LOWER)
    return hlo.on("subtract", hlo.on("xor", half, _LOWER_SIGN), _LOWER_SIGN)


def _places(hlo: Computation, x: Instruction) -> Instruction:
    return hlo.add("convert", x.shape, [_lower_half(hlo, x)])


def _limit_places(hlo: Computation, x: Instruction, most: int) -> Instruction:
    n = _lower_half(hlo, x)
    missing = hlo.on("maximum", hlo.on("subtract", hlo.like(n, -most), n), 0)
    return hlo.from_bits(hlo.wrapping_sum(hlo.bits(x), missing))


def _beyond(hlo: Computation, x: Instruction, n: Instruction) -> Instruction:
    bits = hlo.bits(x)
    return hlo.from_bits(hlo.wrapping_sum(bits, hlo.add("convert", bits.shape, [n])))


def lower_block_max(hlo: Computation, x: Instruction, k: int) -> Instruction:
    """`eft.block_max`: the largest magnitude of each block, for each of its elements."""
    dims = x.array.dims
    words = words_of(dims, k)
    # As bits, magnitudes are ordered like numbers, and NaN is the largest; the maximum of XLA's CPU loses NaN.
    magnitudes = hlo.on("and", hlo.bits(x), _MAGNITUDE)
    rows = hlo.reshape(hlo.pad(magnitudes, words[-1] * k - dims[-1]), (*words, k))
    return hlo.from_bits(spread(hlo, hlo.largest(rows), dims, k))


ON_BITS: Mapping[Any, Callable[..., Instruction]] = {
    eft.power_of_two: _power_of_two,
    eft.inverse_power_of_two: _inverse_power_of_two,
    eft.places: _places,
    eft.limit_places: _limit_places,
    eft.beyond: _beyond,
    eft.bits_of: Computation.bits,
    eft.block_max: lower_block_max,
}
"""How each operation is written, given its operands; whole numbers of a graph stay numbers."""


# Words of blocks -----------------------------------------------------------------------------------------------------


def words_of(dims: tuple[int, ...], k: int) -> tuple[int, ...]:
    """The dimensions of the words of blocks of `k` elements, for a parameter of shape `dims`."""
    return (*dims[:-1], -(-dims[-1] // k))


def spread(hlo: Computation, words: Instruction, dims: tuple[int, ...], k: int) -> Instruction:
    """Gives each element the word of its block."""
    given = words.array.dims
    return hlo.first(hlo.reshape(hlo.repeat(words, k), (*given[:-1], given[-1] * k)), dims[-1])


def gather(hlo: Computation, x: Instruction, k: int) -> Instruction:
    """The first element of each block."""
    return hlo.first(x, x.array.dims[-1], stride=k)
