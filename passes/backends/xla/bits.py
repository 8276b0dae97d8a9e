"""Operations on the bits of fp32 numbers as HLO: each is the function of the same name of `numerics.eft`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from collage_neuron.numerics.eft import (
    EXPONENT,
    beyond,
    bits_of,
    inverse_power_of_two,
    limit_places,
    places,
    power_of_two,
)
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape


def lower_bits_of(hlo: Computation, x: Instruction) -> Instruction:
    """The bits of an fp32 array, as int32."""
    return hlo.add("bitcast-convert", _like(x, "s32"), [x])


def lower_from_bits(hlo: Computation, n: Instruction) -> Instruction:
    """The fp32 array that has these bits."""
    return hlo.add("bitcast-convert", _like(n, "f32"), [n])


def _power_of_two(hlo: Computation, x: Instruction) -> Instruction:
    return lower_from_bits(hlo, _exponent(hlo, x))


def _inverse_power_of_two(hlo: Computation, x: Instruction) -> Instruction:
    exponent = _exponent(hlo, x)
    return lower_from_bits(hlo, hlo.add("xor", exponent.shape, [exponent, number_like(hlo, x, EXPONENT)]))


def _exponent(hlo: Computation, x: Instruction) -> Instruction:
    mask = number_like(hlo, x, EXPONENT)
    return hlo.add("and", mask.shape, [lower_bits_of(hlo, x), mask])


def _lower_half(hlo: Computation, x: Instruction) -> Instruction:
    """The lower 16 bits of fp32 numbers, as signed numbers."""
    mask, sign = number_like(hlo, x, 0xFFFF), number_like(hlo, x, 0x8000)
    half = hlo.add("and", mask.shape, [lower_bits_of(hlo, x), mask])
    return hlo.add("subtract", mask.shape, [hlo.add("xor", mask.shape, [half, sign]), sign])


def _places(hlo: Computation, x: Instruction) -> Instruction:
    return hlo.add("convert", x.shape, [_lower_half(hlo, x)])


def _limit_places(hlo: Computation, x: Instruction, most: int) -> Instruction:
    n = _lower_half(hlo, x)
    missing = hlo.add("subtract", n.shape, [number_like(hlo, x, -most), n])
    missing = hlo.add("maximum", n.shape, [missing, number_like(hlo, x, 0)])
    return lower_from_bits(hlo, hlo.wrapping_sum(lower_bits_of(hlo, x), missing))


def _beyond(hlo: Computation, x: Instruction, n: Instruction) -> Instruction:
    bits = lower_bits_of(hlo, x)
    return lower_from_bits(hlo, hlo.wrapping_sum(bits, hlo.add("convert", bits.shape, [n])))


ON_BITS: Mapping[Any, Callable[..., Instruction]] = {
    power_of_two: _power_of_two,
    inverse_power_of_two: _inverse_power_of_two,
    places: _places,
    limit_places: _limit_places,
    beyond: _beyond,
    bits_of: lower_bits_of,
}
"""How each operation is written, given its operands; whole numbers of a graph stay numbers."""


def number_like(hlo: Computation, like: Instruction, value: int) -> Instruction:
    """An int32 constant in the shape of another array."""
    return hlo.broadcast(hlo.constant(value, "s32"), _like(like, "s32").dims)


def _like(x: Instruction, element: str) -> Shape:
    return Shape(element, x.array.dims)
