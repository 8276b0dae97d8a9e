"""One rule per operation of explicit-rounding form: the instructions that give its bits, for any width.

LLVM computes what is written and contracts nothing, unless a flag of an instruction allows it; none here has one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from collage_neuron.numerics.eft import (
    EXPONENT,
    LARGEST,
    beyond,
    bits_of,
    capped,
    inverse_power_of_two,
    limit_places,
    narrow,
    places,
    power_of_two,
    round_to,
    shift_right,
    sqrt,
    stochastic_round,
    storage_named,
    whole,
    widen,
)
from collage_neuron.passes.backends.native import words
from collage_neuron.passes.backends.native.llvm_builder import FLOAT, INT, MASK, Code, NotEmitted, Value
from collage_neuron.passes.backends.native.words import UPPER_HALF, limited, product, to_int32, to_integer

Rule = Callable[..., Value]
"""Adds the instructions of an operation to a `Code`, its first argument; the others are values, numbers and names."""

QUIET_NAN = 0x7FC00000
MAGNITUDE = 0x7FFFFFFF
SIGN, ONE = -0x80000000, 0x3F800000


def _kind(*operands: Any) -> str:
    """What an operation computes with: integers if one operand is one."""
    return INT if any(isinstance(x, Value) and x.kind == INT for x in operands) else FLOAT


def _arithmetic(floats: str, integers: str | None) -> Rule:
    def rule(code: Code, x: Any, y: Any) -> Value:
        kind = _kind(x, y)
        opcode = integers if kind == INT else floats
        if opcode is None or all(isinstance(operand, Value) and operand.kind == MASK for operand in (x, y)):
            raise NotEmitted(f"{floats} of integers, or of two masks")
        return code.binary(opcode, kind, x, y)

    return rule


def _comparison(floats: str, integers: str) -> Rule:
    def rule(code: Code, x: Any, y: Any) -> Value:
        kind = _kind(x, y)
        return code.compare(f"icmp {integers}" if kind == INT else f"fcmp {floats}", kind, x, y)

    return rule


def _of_kind(opcode: str, kind: str) -> Rule:
    return lambda code, x, y: code.binary(opcode, kind, x, y)


def _called(intrinsic: str) -> Rule:
    return lambda code, *operands: code.call(intrinsic, FLOAT, *operands)


def _not(code: Code, x: Any) -> Value:
    return code.binary("xor", MASK, x, -1)


def _negated(code: Code, x: Any) -> Value:
    return code.op(FLOAT, f"fneg {code.type_of(FLOAT)} {code.text(x, FLOAT)}")


def _where(code: Code, mask: Any, x: Any, y: Any) -> Value:
    return code.select(mask, x, y, _kind(x, y))


def _sign(code: Code, x: Any) -> Value:
    """1 or -1, and 0 for both zeros and NaN, as torch has it."""
    one = code.binary("or", INT, code.binary("and", INT, code.bits(x), SIGN), ONE)
    # LLVM's `one` is false for NaN, which has the sign 0 then, as both zeros have.
    return code.select(code.compare("fcmp one", FLOAT, x, 0.0), code.float_of(one), 0.0, FLOAT)


def _extremum(comparison: str) -> Rule:
    """NaN if one operand is NaN, and of equal ones the second: what torch's vectors do with zeros of both signs."""

    def rule(code: Code, x: Any, y: Any) -> Value:
        chosen = code.select(code.compare(f"fcmp {comparison}", FLOAT, x, y), x, y, FLOAT)
        is_nan = code.compare("fcmp uno", FLOAT, x, y)
        # A sum with a NaN hands that on, whichever operand it is.
        return code.select(is_nan, code.binary("fadd", FLOAT, x, y), chosen, FLOAT)

    return rule


def _capped(code: Code, x: Any) -> Value:
    return limited(code, x, "ogt", LARGEST)


def _power_of_two(code: Code, x: Any) -> Value:
    return code.float_of(code.binary("and", INT, code.bits(x), EXPONENT))


def _inverse_power_of_two(code: Code, x: Any) -> Value:
    bits = code.binary("and", INT, code.bits(x), EXPONENT)
    return code.float_of(code.binary("xor", INT, bits, EXPONENT))


def to_bf16(code: Code, x: Any) -> Value:
    """Rounds to nearest even: adds just less than half of the last place, or half where that place is odd, and cuts."""
    # AVX-512's own conversion to bf16 gains nothing, and takes subnormals for zeros.
    half: Value | int = 0x8000
    if isinstance(x, Value) and x.limited is not None:
        x = x.limited[0]  # what was moved off halfway, away from 0, is what is rounded up there
        bits = code.bits(x)
    else:
        bits = code.bits(x)
        # To choose between two constants is faster than to add the odd bit.
        odd = code.compare("icmp ne", INT, code.binary("and", INT, bits, 0x10000), 0)
        half = code.select(odd, 0x8000, 0x7FFF, INT)
    cut = code.binary("and", INT, code.binary("add", INT, bits, half), UPPER_HALF)
    return code.float_of(code.select(code.compare("fcmp ord", FLOAT, x, x), cut, QUIET_NAN, INT))


def _to_fp32(code: Code, x: Any) -> Value:
    return Value(code.text(x, FLOAT), FLOAT)


INTEGERS = ("int8", "int16", "uint8", "uint16")

ROUNDINGS: Mapping[str, Rule] = MappingProxyType(
    {
        "bf16": to_bf16,
        "fp32": _to_fp32,
        **{name: partial(to_integer, limits=storage_named(name).limits) for name in INTEGERS},
    }
)
"""How a float is rounded to each storage type; the result is a float."""


def _round_to(code: Code, x: Any, storage: str) -> Value:
    if storage not in ROUNDINGS:
        raise NotEmitted(f"the storage type {storage!r}")
    return ROUNDINGS[storage](code, x)


def stochastic_to_bf16(code: Code, x: Any, random: Any) -> Value:
    """Adds 16 random bits to the last 16, and cuts those."""
    carried = code.binary("and", INT, code.binary("add", INT, code.bits(x), random), UPPER_HALF)
    is_number = code.compare("fcmp oeq", FLOAT, x, x)
    return code.float_of(code.select(is_number, carried, QUIET_NAN, INT))


def _product(code: Code, x: Any, y: Any) -> Value:
    return product(code, _arithmetic("fmul", None)(code, x, y), x, y)


def _widen(code: Code, x: Value) -> Value:
    # Words were widened when they were loaded; others are truth values, and integers of up to 24 bits.
    return code.cast("sitofp", x, FLOAT) if x.kind == INT else x


RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        operator.add: _arithmetic("fadd", "add"),
        operator.sub: _arithmetic("fsub", "sub"),
        operator.mul: _product,
        operator.truediv: _arithmetic("fdiv", None),
        operator.neg: _negated,
        operator.lt: _comparison("olt", "slt"),
        operator.le: _comparison("ole", "sle"),
        operator.gt: _comparison("ogt", "sgt"),
        operator.ge: _comparison("oge", "sge"),
        operator.eq: _comparison("oeq", "eq"),
        operator.ne: _comparison("une", "ne"),  # `une` is true for NaN, which differs from itself too
        torch.logical_or: _of_kind("or", MASK),
        torch.logical_and: _of_kind("and", MASK),
        torch.logical_not: _not,
        torch.where: _where,
        torch.maximum: _extremum("ogt"),
        torch.minimum: _extremum("olt"),
        torch.abs: _called("fabs"),
        torch.sign: _sign,
        capped: _capped,
        sqrt: _called("sqrt"),
        # The C library's, within 1 ulp of the exact result (glibc 2.28 and later); so are torch's.
        torch.exp: _called("exp"),
        torch.log: _called("log"),
        torch.pow: _called("pow"),
        power_of_two: _power_of_two,
        inverse_power_of_two: _inverse_power_of_two,
        places: words.places,
        limit_places: words.limit_places,
        beyond: words.beyond,
        round_to: _round_to,
        widen: _widen,
        narrow: _round_to,  # a number of its type already, and nothing to do, unless it is NaN
        stochastic_round: stochastic_to_bf16,
        whole: to_int32,
        bits_of: lambda code, x: code.bits(x),
        shift_right: _of_kind("lshr", INT),
        operator.lshift: _of_kind("shl", INT),
        operator.and_: _of_kind("and", INT),
        operator.or_: _of_kind("or", INT),
        operator.xor: _of_kind("xor", INT),
    }
)
"""The rule of each operation."""
