"""Instruction selection: lists all instructions that can compute a value.

An instruction may include the preceding operation if that has a number as an operand and is not rounded to bf16: the
engines keep fp32 between the two operations of one instruction, so each is rounded to fp32 as it would be separately.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from collage_neuron.passes.backends.nki import ir
from collage_neuron.passes.backends.nki.hardware import Generation
from collage_neuron.passes.backends.nki.ir import (
    Column,
    Instruction,
    Operand,
    Program,
    Spread,
    Value,
    View,
    nonnegative,
)

APPROXIMATE = frozenset({"sqrt", "reciprocal", "exact_reciprocal", "exp", "log", "power"})
"""Operations that the device approximates, with an error that is not published."""

ARITHMETIC = frozenset({"add", "subtract", "multiply", "maximum", "minimum"}) | ir.MASKS
"""Operators of the vector engine's ALU."""

ON_GPSIMD = frozenset({"add", "multiply"})
"""Operators that the GpSimd engine has too."""


def is_exact(value: Value) -> bool:
    """Returns True if a tile rounds nothing: another value cannot be left out of a computation, or done again.

    A number that is stored as uint8 has the type of a mask, and is rounded.
    """
    return value.dtype == "float32" or (value.op in ir.MASKS and value.dtype == ir.MASK)


ACTIVATIONS = frozenset({"sqrt", "reciprocal", "exp", "log", "sign", "abs"})


@dataclass(frozen=True)
class Scaled:
    """A value computed from one tile and one number: `op(data, number)`, or `op(number, data)` if `reverse`."""

    data: Value | View
    op: str
    number: Operand
    reverse: bool


def scaled(value: Operand) -> Scaled | None:
    """`value` as an operation on a tile and a number."""
    if not isinstance(value, Value) or value.op not in ARITHMETIC:
        return None
    x, y = value.args
    if not isinstance(x, (Value, View)):
        return Scaled(y, value.op, x, True)  # type: ignore[arg-type]  # one of the two is a tile
    return None if isinstance(y, (Value, View)) else Scaled(x, value.op, y, False)


def unrounded(value: Operand) -> Scaled | None:
    """`scaled`, if the instruction that reads the value can include it: it is fp32 (or a mask, which is exact)."""
    return scaled(value) if isinstance(value, Value) and (is_exact(value) or value.op in ir.MASKS) else None


class Known(NamedTuple):
    """What is known of the values of a program."""

    approximate: set[Value]
    """Values that depend on a function that the device approximates."""
    positive: set[Value]
    """Values that are neither negative nor NaN, if the host's checks of the numbers of the step pass."""


def choices(program: Program, g: Generation) -> dict[Value, tuple[Instruction, ...]]:
    """The instructions that can compute each value of a program on a generation, the simplest first."""
    known = Known(set(), set())
    for value in program.values:
        if value.op in APPROXIMATE or any(a in known.approximate for a in value.tiles()):
            known.approximate.add(value)
        if _is_from_roots(value) and (entries := nonnegative(value)) is not None and entries <= program.nonnegative:
            known.positive.add(value)
    return {v: tuple(i for i in _choices(v, known) if _is_possible(v, i, g)) for v in program.values}


def _is_from_roots(x: Operand) -> bool:
    """Returns True if x is computed from square roots and numbers alone: not NaN, since a root's operand is clamped."""
    if not isinstance(x, Value):
        return not isinstance(x, (View, Spread))
    keeps = x.op in ("add", "multiply", "copy", "minimum", "maximum")
    return x.op == "sqrt" or (keeps and all(map(_is_from_roots, x.args)))


def _is_possible(value: Value, instruction: Instruction, g: Generation) -> bool:
    """Returns False for what a generation may compute wrongly, or need not, and for what is not generated.

    Not generated are views of halves of bits in what goes by block.
    """
    # relu stands in for a copy only where the device drops the bias of a copy (aws-neuron-sdk#1296).
    if instruction["op"] == "relu" and "copy" in g.adds_bias:
        return False
    if instruction["bias"] is not None and instruction["op"] not in g.adds_bias:
        return False
    halves = value.op in ir.HALVES or any(isinstance(x, View) for x in instruction.operands())
    return not (instruction.by_block and halves)


def _choices(value: Value, known: Known) -> Iterator[Instruction]:
    if value.op in ("copy", "own_copy", "lower"):
        (source,) = value.args
        yield from _copies(source)
        if isinstance(source, Value) and source.op in ARITHMETIC and is_exact(source):
            # Computed again, rounded at once; a number of places is an int16 already, as which it is rounded.
            dtype = "int16" if value.op == "lower" else value.dtype
            yield from _choices(replace(source, dtype=dtype), known)
    elif value.op == "fill":
        yield from _fills(value.args[0])
    elif value.op == "masked":
        x, *masks = value.args
        for mask in masks:
            yield from _on_two_tiles(replace(value, op="multiply", args=(x, mask)))
    elif value.op in _ONE_WAY:
        yield _ONE_WAY[value.op](value)
    elif value.op in ACTIVATIONS:
        yield from _activations(value.op, value.args[0], known)
    elif scaled(value):
        yield from _on_one_tile(value, known)
    else:
        yield from _on_two_tiles(value)


def _instruction(kind: str, engine: str = "vector", bits: str = "", whole: bool = False, **fields: Any) -> Instruction:
    given = tuple((k, v) for k, v in fields.items() if v is not None and v is not False)
    return Instruction(kind, engine, given, bits, whole)


BITS = {"float32": ("int32", 0x7F800000), "bfloat16": ("int16", 0x7F80)}
"""The integer type of the same size, and the exponent among the bits."""


def _fills(x: Operand) -> Iterator[Instruction]:
    """A tile of one number."""
    # No literal of a kernel is infinite: infinity is filled in as its bits, which are those of the exponent alone.
    bits, x = BITS["float32"] if x == math.inf else ("", x)
    yield _instruction("memset", "vector", bits, value=x)
    yield _instruction("memset", "gpsimd", bits, value=x)


def _power_of_two(value: Value) -> Instruction:
    """The exponent's bits alone, or inverted."""
    # One instruction, and exact: operators on bits take integer types, and convert nothing.
    bits, exponent = BITS[value.dtype]
    inverted: dict[str, Any] = (
        {"op1": "bitwise_xor", "operand1": exponent} if value.op == "inverse_power_of_two" else {}
    )
    return _instruction(
        "tensor_scalar", bits=bits, data=value.args[0], op0="bitwise_and", operand0=exponent, **inverted
    )


def _clamp(value: Value) -> Instruction:
    data, low, high = value.args
    return _instruction("tensor_scalar", data=data, op0="maximum", operand0=low, op1="minimum", operand1=high)


def _limit_places(value: Value) -> Instruction:
    """The lower halves of a tile, limited where they are."""
    tile, least = value.args
    assert isinstance(tile, Value)
    return _instruction("tensor_scalar", data=View(tile, half=0), op0="maximum", operand0=least)


def _upper_halves(value: Value) -> Instruction:
    """upper - (places < 0): the bits of a bf16 number as an integer, and 1 less where a number below it is meant."""
    _, upper, sign = value.args
    return _instruction(
        "scalar_tensor_tensor", data=sign, op0="less", operand0=0.0, op1="subtract", operand1=upper, reverse1=True
    )


def _largest(value: Value) -> Instruction:
    return _instruction("tensor_reduce", whole=value.op == "peak", op="maximum", data=value.args[0])


_ONE_WAY: Mapping[str, Callable[[Value], Instruction]] = {
    "select": lambda v: _instruction("tensor_copy_predicated", src=v.args[1], predicate=v.args[0]),
    "clamp": _clamp,
    "exact_reciprocal": lambda v: _instruction("reciprocal", data=v.args[0]),
    "power": lambda v: _instruction("tensor_tensor", "gpsimd", data1=v.args[0], data2=v.args[1], op="power"),
    "block_max": _largest,
    "peak": _largest,
    "total": lambda v: _instruction("tensor_reduce", op="add", data=v.args[0]),
    "draw": lambda v: _instruction("rng"),
    "carried": lambda v: _instruction("tensor_tensor", data1=v.args[0], data2=v.args[1], op="add"),
    "limit_places": _limit_places,
    "upper": _upper_halves,
    **dict.fromkeys(ir.POWERS.values(), _power_of_two),
}
"""Operations that one instruction computes, and no other can."""


def _copies(x: Operand) -> Iterator[Instruction]:
    yield _instruction("activation", "scalar", op="copy", data=x)
    yield _instruction("tensor_copy", "vector", src=x)
    yield _instruction("tensor_copy", "gpsimd", src=x)


def _activations(op: str, x: Operand, known: Known) -> Iterator[Instruction]:
    yield _instruction("activation", "scalar", op=op, data=x)
    if op == "abs":
        # An operator of one operand still wants a second one, which is 0 ([ISA] tensor_scalar).
        yield _instruction("tensor_scalar", data=x, op0="abs", operand0=0.0)
    if op in ("exp", "sign", "abs") and isinstance(x, Value):
        yield from _affine(op, x, known)


def _on_one_tile(value: Value, known: Known) -> Iterator[Instruction]:
    s = scaled(value)
    assert s is not None
    yield _instruction("tensor_scalar", data=s.data, op0=s.op, operand0=s.number, reverse0=s.reverse)
    # Two operations cost what one does in this instruction ([ISA]), so the one before is made in it if possible.
    if inner := unrounded(s.data):
        yield _instruction(
            "tensor_scalar",
            data=inner.data, op0=inner.op, operand0=inner.number, reverse0=inner.reverse,
            op1=s.op, operand1=s.number, reverse1=s.reverse,
        )  # fmt: skip
    yield from _affine("copy", value, known)


def _affine(op: str, value: Value, known: Known) -> Iterator[Instruction]:
    """ScalarE's op(data * scale + bias), for a value that is data * scale + bias."""
    outer = unrounded(value) if op != "copy" else scaled(value)
    if outer is None:
        return
    if outer.op == "multiply":
        yield _instruction("activation", "scalar", op=op, data=outer.data, scale=outer.number)
    bias, sign = _bias(outer)
    if bias is None:
        return
    inner = unrounded(outer.data)
    # relu of a number that is neither negative nor NaN is a copy, which adds the bias where plain copies drop it.
    for function in (op, *["relu"] * (op == "copy" and value in known.positive)):
        yield _instruction("activation", "scalar", op=function, data=outer.data, scale=sign, bias=bias)
        # Whether its multiply-add rounds once or twice is not documented, so it does both only on data whose last bits
        # are not known anyway.
        if inner and inner.op == "multiply" and sign is None and inner.data in known.approximate:
            yield _instruction("activation", "scalar", op=function, data=inner.data, scale=inner.number, bias=bias)


def _bias(s: Scaled) -> tuple[Column | None, float | None]:
    """The column that is added to the data, and the factor of the data (None means 1)."""
    if not isinstance(s.number, Column) or s.op not in ("add", "subtract"):
        return None, None
    if s.op == "subtract" and not s.reverse:
        return Column(target=operator.neg, args=(s.number,)), None
    return s.number, -1.0 if s.op == "subtract" else None


def _on_two_tiles(value: Value) -> Iterator[Instruction]:
    x, y = value.args
    for engine in ("vector", "gpsimd") if value.op in ON_GPSIMD else ("vector",):
        yield _instruction("tensor_tensor", engine, data1=x, data2=y, op=value.op)
    if value.op == "multiply" and x is y:
        yield _instruction("activation", "scalar", op="square", data=x)
    for first, second, reverse in ((x, y, False), (y, x, True)):
        if inner := unrounded(first):
            # The operator with its operands exchanged; a difference has none, and is turned by `reverse1` instead.
            op = ir.MIRRORED.get(value.op) if reverse else value.op
            yield _instruction(
                "scalar_tensor_tensor",
                data=inner.data, op0=inner.op, operand0=inner.number, reverse0=inner.reverse,
                op1=op or value.op, operand1=second, reverse1=reverse and op is None,
            )  # fmt: skip
