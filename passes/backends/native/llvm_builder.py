"""Lines of LLVM's assembly: typed values of one width, scalars or vectors, and what makes one of others."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from collage_neuron.passes.ir.stage import ancestors

FLOAT, INT, MASK, DOUBLE = "float", "i32", "i1", "double"

INTRINSICS = (
    "declare i64 @llvm.smin.i64(i64, i64)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
)
"""Those that are written by name; the others `Code.call` and `Code.reduce` declare."""

NAME, RESULT = re.compile(r"%\w+"), re.compile(r" +%\w+ = ")


class Fixed(NamedTuple):
    """The integer of which a float is 2**-places times, exactly but for the sign of a zero: see `words`."""

    number: Value
    places: int
    zeros: int
    """How many of the last bits of `number` are known to be 0."""
    least: float
    most: float
    """Between which the float is."""

    @property
    def is_whole(self) -> bool:
        """Returns True if the float is known to be a whole number."""
        return self.places <= self.zeros


class Value(NamedTuple):
    """A value by the name that it has in the text, and what is known of it."""

    text: str
    kind: str
    """The type of one element: FLOAT, INT, MASK, or the type of a word in memory."""
    fixed: Fixed | None = None
    """An integer that tells this float."""
    word: Value | None = None
    """An integer whose last 16 bits are those of this float, which is a whole number."""
    limited: tuple[Value, int] | None = None
    """The operands of the `limit_places` that this is."""


class NotEmitted(Exception):
    """An operation, an operand or a word that this backend has no code for; the message names it."""


@dataclass
class Code:
    """Lines in order, whose values have `width` elements; 1 are scalars."""

    width: int
    names: Iterator[int]
    """The numbers of values, which all parts of a function share."""
    declared: set[str]
    """Declarations of the intrinsics that are called, shared in the same way."""
    lines: list[str] = field(default_factory=list)

    def type_of(self, kind: str, times: int = 1) -> str:
        """The type of a value whose elements are of `kind`; `times` as many as usual."""
        return kind if self.width == times == 1 else f"<{self.width * times} x {kind}>"

    def put(self, text: str) -> None:
        """Adds an instruction without a result."""
        self.lines.append(f"  {text}")

    def op(self, kind: str, text: str) -> Value:
        """Adds an instruction; its result."""
        name = f"%v{next(self.names)}"
        self.lines.append(f"  {name} = {text}")
        return Value(name, kind)

    def text(self, operand: Any, kind: str) -> str:
        """An operand, a value of `kind` or a number, as it stands in an instruction."""
        if not isinstance(operand, Value):
            return self.literal(operand, kind)
        if (operand.kind, kind) == (MASK, FLOAT):
            return self.select(operand, 1.0, 0.0, FLOAT).text  # as torch's; a conversion takes three instructions
        if operand.kind != kind:
            raise NotEmitted(f"an operand is {operand.kind}, where {kind} is expected")
        return operand.text

    def literal(self, number: Any, kind: str) -> str:
        """A Python number as a constant of `kind`."""
        if not isinstance(number, (bool, int, float)):
            raise NotEmitted(f"the operand {number!r} is not a number")
        written = float_literal(number) if kind == FLOAT else str(int(number))
        return written if self.width == 1 else f"splat ({kind} {written})"

    def binary(self, opcode: str, kind: str, x: Any, y: Any) -> Value:
        """An operation of two operands and a result of one kind."""
        return self.op(kind, f"{opcode} {self.type_of(kind)} {self.text(x, kind)}, {self.text(y, kind)}")

    def compare(self, opcode: str, kind: str, x: Any, y: Any) -> Value:
        """A comparison, such as `fcmp olt`."""
        return self.op(MASK, f"{opcode} {self.type_of(kind)} {self.text(x, kind)}, {self.text(y, kind)}")

    def cast(self, opcode: str, x: Value, kind: str) -> Value:
        """A conversion, of values or of bits."""
        return self.op(kind, f"{opcode} {self.type_of(x.kind)} {x.text} to {self.type_of(kind)}")

    def select(self, mask: Any, x: Any, y: Any, kind: str) -> Value:
        """Where `mask` is true x, else y."""
        t, condition = self.type_of(kind), f"{self.type_of(MASK)} {self.text(mask, MASK)}"
        return self.op(kind, f"select {condition}, {t} {self.text(x, kind)}, {t} {self.text(y, kind)}")

    def call(self, intrinsic: str, kind: str, *operands: Any) -> Value:
        """A call of the intrinsic `llvm.intrinsic`, whose result is of the kind of its operands."""
        full, t = f"@llvm.{intrinsic}.{suffix(self.width, kind)}", self.type_of(kind)
        self.declared.add(f"declare {t} {full}({', '.join([t] * len(operands))})")
        given = ", ".join(f"{t} {self.text(x, kind)}" for x in operands)
        return self.op(kind, f"call {t} {full}({given})")

    def reduce(self, operation: str, kind: str, x: Value) -> Value:
        """One number of all elements of a vector, by the intrinsic `llvm.vector.reduce.operation`."""
        full, t = f"@llvm.vector.reduce.{operation}.{suffix(self.width, kind)}", self.type_of(kind)
        self.declared.add(f"declare {kind} {full}({t})")
        return self.op(kind, f"call {kind} {full}({t} {x.text})")

    def bits(self, x: Any) -> Value:
        """The bits of a float as an integer."""
        return self.op(INT, f"bitcast {self.type_of(FLOAT)} {self.text(x, FLOAT)} to {self.type_of(INT)}")

    def float_of(self, bits: Value) -> Value:
        """The float of which these are the bits."""
        return self.cast("bitcast", bits, FLOAT)

    def shuffle(self, x: str, y: str, kind: str, given: int, lanes: list[int]) -> Value:
        """A vector of the elements with the numbers `lanes` of x and y, which have `given` elements each."""
        t, mask = f"<{given} x {kind}>", ", ".join(f"i32 {lane}" for lane in lanes)
        return self.op(kind, f"shufflevector {t} {x}, {t} {y}, <{len(lanes)} x i32> <{mask}>")

    def spread(self, scalar: Value) -> Value:
        """A vector of equal elements."""
        t = self.type_of(scalar.kind)
        one = self.op(scalar.kind, f"insertelement {t} poison, {scalar.kind} {scalar.text}, i64 0")
        return self.shuffle(one.text, "poison", scalar.kind, self.width, [0] * self.width)


def loop(
    name: str, before: str, index: tuple[str, str, int], end: str, body: Iterable[str], after: str, last: str = "",
    more: Iterable[tuple[str, str, str, str]] = (),
) -> Iterator[str]:  # fmt: skip
    """The loop called `name`, behind the block `before`: (a name, where it begins, its step) up to `end`, once or more.

    `last` is the block in which the body ends, if it has several; `after` the one behind the loop. `more` changes with
    the index: names, types, values in the first turn, and the instruction that makes the next one.
    """
    i, first, step = index
    changing = [(i, "i64", first, f"add i64 {i}, {step}"), *more]
    yield f"  br label %{name}"
    yield f"{name}:"
    for x, kind, begin, _ in changing:
        yield f"  {x} = phi {kind} [ {begin}, %{before} ], [ {x}_next, %{last or name} ]"
    yield from body
    for x, _, _, instruction in changing:
        yield f"  {x}_next = {instruction}"
    yield f"  {i}_more = icmp slt i64 {i}_next, {end}"
    yield f"  br i1 {i}_more, label %{name}, label %{after}"
    yield f"{after}:"


def live(lines: Sequence[str]) -> list[str]:
    """The lines of a function without those whose results nothing needs; loops may use what later lines define."""
    # No pass of LLVM runs over the text (`machine.CODE_GENERATION`), so it is here that dead lines are dropped.
    operands = {line.split()[0]: NAME.findall(line) for line in lines if RESULT.match(line)}
    needed = [name for line in lines if not RESULT.match(line) for name in NAME.findall(line)]
    found = ancestors(needed, lambda name: operands.get(name, ()))
    return [line for line in lines if not RESULT.match(line) or line.split()[0] in found]


def suffix(width: int, kind: str) -> str:
    """How the name of an intrinsic writes a type: `v16f32`."""
    element = {FLOAT: "f32", DOUBLE: "f64"}.get(kind, kind)
    return element if width == 1 else f"v{width}{element}"


def float_literal(number: float) -> str:
    """A Python number, rounded to fp32 as torch does, in LLVM's notation: the bits of the same number in double."""
    rounded = ctypes.c_float(number).value
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
