"""Writes an HLO module as the bytes of an `HloModuleProto`, using only the standard library.

torch_xla's own builder has no reduce-precision, the one instruction that XLA may not delete, and it hashes a graph's
operations without their wiring (pytorch/xla issue 8353). A module passed as bytes has neither problem within. Fields:
xla/service/hlo.proto and xla/xla_data.proto in openxla/xla; wire format: the protocol buffers encoding guide.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

ELEMENT_TYPES = {
    "pred": 1, "s8": 2, "s16": 3, "s32": 4, "u8": 6, "u16": 7, "u32": 8, "f16": 10, "f32": 11, "f64": 12,
    "bf16": 16, "f8e5m2": 19, "f8e4m3fn": 20,
}  # fmt: skip
"""The codes of `PrimitiveType` in xla/xla_data.proto."""
_PACKED = {"f32": (8, "<f"), "f64": (9, "<d")}
"""Where `LiteralProto` keeps floating-point numbers, and how."""
_TUPLE = 13
_ENTRY = 1
"""The id of the entry computation; XLA requires ids to be unique over computations and instructions together."""


def varint(n: int) -> bytes:
    """Encodes an integer with seven bits per byte, the lowest first."""
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def integer(number: int, value: int) -> bytes:
    """A field that holds one integer, enum or bool."""
    return varint(number << 3) + varint(value)


def message(number: int, content: bytes | str) -> bytes:
    """A field that holds a string or an embedded message."""
    data = content.encode() if isinstance(content, str) else content
    return varint(number << 3 | 2) + varint(len(data)) + data


def packed(number: int, values: Sequence[int]) -> bytes:
    """A repeated integer field."""
    return message(number, b"".join(map(varint, values))) if values else b""


@dataclass(frozen=True)
class Shape:
    """Element type and dimensions of an array, row-major."""

    element: str
    dims: tuple[int, ...] = ()

    def encode(self) -> bytes:
        # `minor_to_major`: the last dimension is the one whose elements lie one after another.
        layout = packed(1, range(len(self.dims) - 1, -1, -1))
        return (
            integer(2, ELEMENT_TYPES[self.element])
            + packed(3, self.dims)
            + message(5, layout)
            + packed(6, [0] * len(self.dims))  # `is_dynamic_dimension`: XLA wants one for each
        )

    def of(self, dims: Iterable[int]) -> Shape:
        """The shape of other dimensions."""
        return Shape(self.element, tuple(dims))

    def __str__(self) -> str:
        return f"{self.element}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class TupleShape:
    """The shape of a tuple of arrays."""

    elements: tuple[Shape, ...]

    def encode(self) -> bytes:
        return integer(2, _TUPLE) + b"".join(message(4, s.encode()) for s in self.elements)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.elements))})"


@dataclass(frozen=True)
class Instruction:
    """An instruction of the computation, as an operand of later ones."""

    id: int
    shape: Shape | TupleShape

    @property
    def array(self) -> Shape:
        """The shape of an array, not of a tuple."""
        assert isinstance(self.shape, Shape)
        return self.shape


@dataclass
class Computation:
    """A computation under construction; `module` gives the bytes of a module whose entry it is."""

    name: str
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(_ENTRY))
    _encoded: list[bytes] = field(default_factory=list)
    _parameters: list[Shape] = field(default_factory=list)
    _called: list[bytes] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    """The instructions so far, one per line, for readers and golden tests."""

    def __post_init__(self) -> None:
        self.id = next(self._ids)

    def add(
        self, opcode: str, shape: Shape | TupleShape, operands: Sequence[Instruction] = (), attributes: bytes = b""
    ) -> Instruction:
        """Appends an instruction; `attributes` are encoded fields of HloInstructionProto."""
        number = next(self._ids)
        self._encoded.append(
            message(1, f"{opcode}.{number}")
            + message(2, opcode)
            + message(3, shape.encode())
            + integer(35, number)
            + packed(36, [o.id for o in operands])
            + attributes
        )
        self.text.append(f"%{number} = {shape} {opcode}({', '.join(f'%{o.id}' for o in operands)})")
        return Instruction(number, shape)

    def parameter(self, shape: Shape) -> Instruction:
        """The next parameter."""
        self._parameters.append(shape)
        return self.add("parameter", shape, attributes=integer(9, len(self._parameters) - 1))

    def constant(self, value: float, element: str = "f32") -> Instruction:
        """A scalar constant, f32, f64 or s32."""
        if element in _PACKED:
            number, code = _PACKED[element]
            data = message(number, struct.pack(code, value))
        else:
            data = packed(4, [int(value) % 2**64])  # a varint of a negative number is its two's complement
        return self.add("constant", Shape(element), attributes=message(8, message(1, Shape(element).encode()) + data))

    def reduce_precision(self, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
        """x rounded to nearest even in a format with these bits."""
        return self.add("reduce-precision", x.shape, [x], integer(18, exponent_bits) + integer(19, mantissa_bits))

    def round_nearest_even(self, x: Instruction) -> Instruction:
        """x rounded to a whole number."""
        return self.on("round-nearest-even", x)

    def wrapping_sum(self, x: Instruction, y: Instruction) -> Instruction:
        """The sum of two int32 arrays, modulo 2**32."""
        return self.on("add", x, y)

    def on(self, opcode: str, x: Instruction, *others: Instruction | float) -> Instruction:
        """An operation on an array and others like it, whose result is like it too."""
        return self.add(opcode, x.shape, [x, *(self.like(x, y) for y in others)])

    def like(self, x: Instruction, y: Instruction | float) -> Instruction:
        """An operand as an array: for a number, one of the type and shape of x that is this number everywhere."""
        return y if isinstance(y, Instruction) else self.broadcast(self.constant(y, x.array.element), x.array.dims)

    def bits(self, x: Instruction) -> Instruction:
        """The bits of an fp32 array, as int32."""
        return self.add("bitcast-convert", Shape("s32", x.array.dims), [x])

    def from_bits(self, n: Instruction) -> Instruction:
        """The fp32 array that has these bits."""
        return self.add("bitcast-convert", Shape("f32", n.array.dims), [n])

    def select(self, mask: Instruction, x: Instruction | float, y: Instruction) -> Instruction:
        """x where the mask is true, else y."""
        return self.add("select", y.shape, [mask, self.like(y, x), y])

    def compare(self, direction: str, x: Instruction, y: Instruction | float) -> Instruction:
        """A comparison, direction one of LT, LE, GT, GE, EQ, NE."""
        return self.add("compare", Shape("pred", x.array.dims), [x, self.like(x, y)], message(63, direction))

    def element(self, vector: Instruction, index: int, dims: tuple[int, ...]) -> Instruction:
        """vector[index], an fp32 scalar, broadcast to `dims`."""
        # Numbers come as one vector: torch_xla compiles anew where a 0-d tensor becomes 0 or 1.
        return self.broadcast(self.reshape(self.part(vector, 0, index, 1), ()), dims)

    def broadcast(self, scalar: Instruction, dims: tuple[int, ...]) -> Instruction:
        """A scalar repeated to `dims`."""
        return self.add("broadcast", Shape(scalar.array.element, dims), [scalar]) if dims else scalar

    def numbers(self, dims: tuple[int, ...]) -> Instruction:
        """0, 1, 2, ... in row-major order, s32."""
        return self.reshape(self.add("iota", Shape("s32", (math.prod(dims),)), attributes=packed(14, [0])), dims)

    def reshape(self, x: Instruction, dims: tuple[int, ...]) -> Instruction:
        """The same elements in the same order."""
        return self.add("reshape", Shape(x.array.element, dims), [x])

    def reshaped(self, x: Instruction, dims: tuple[int, ...]) -> Instruction:
        """The same, without an instruction if `x` has that shape."""
        return x if x.array.dims == dims else self.reshape(x, dims)

    def repeat(self, x: Instruction, k: int) -> Instruction:
        """Each element k times, along a new last dimension."""
        dims = x.array.dims
        return self.add("broadcast", x.array.of((*dims, k)), [x], packed(14, range(len(dims))))

    def first(self, x: Instruction, size: int, stride: int = 1) -> Instruction:
        """The elements 0, stride, 2 * stride, ... below `size` of the last dimension."""
        return self._slice(x, [*((0, n, 1) for n in x.array.dims[:-1]), (0, size, stride)])

    def part(self, x: Instruction, dim: int, first: int, size: int) -> Instruction:
        """`size` elements of a dimension, from `first` on."""
        return self._slice(x, [(first, first + size, 1) if d == dim else (0, n, 1) for d, n in enumerate(x.array.dims)])

    def _slice(self, x: Instruction, bounds: Sequence[tuple[int, int, int]]) -> Instruction:
        encoded = (message(17, integer(1, start) + integer(2, end) + integer(3, step)) for start, end, step in bounds)
        dims = (-((start - end) // step) for start, end, step in bounds)
        return self.add("slice", x.array.of(dims), [x], b"".join(encoded))

    def pad(self, x: Instruction, count: int, dim: int = -1) -> Instruction:
        """A dimension, the last one if none is given, with `count` zeros after it."""
        shape = x.array
        counts = [0] * len(shape.dims)
        counts[dim] = count
        zero = self.constant(0, shape.element)
        padding = b"".join(message(1, integer(2, n)) for n in counts)
        return self.add("pad", shape.of(map(add, shape.dims, counts)), [x, zero], message(21, padding))

    def stretch(self, x: Instruction, dims: tuple[int, ...]) -> Instruction:
        """A scalar, or an array of which dimensions are 1 that are longer in `dims`, repeated along these."""
        shape = x.array
        if shape.dims == dims:
            return x
        kept = [d for d, n in enumerate(shape.dims) if n == dims[d]]
        left = self.reshape(x, tuple(dims[d] for d in kept))
        return self.add("broadcast", shape.of(dims), [left], packed(14, kept))

    def largest(self, x: Instruction) -> Instruction:
        """The maximum over the last dimension of numbers that are not negative; 0 for none."""
        shape = x.array
        attributes = packed(14, [len(shape.dims) - 1]) + packed(38, [self._combiner("maximum", [shape.element])])
        return self.add(
            "reduce", Shape(shape.element, shape.dims[:-1]), [x, self.constant(0, shape.element)], attributes
        )

    def sums(self, xs: Sequence[Instruction]) -> list[Instruction]:
        """The sum of each of `xs` over its last dimension, in one instruction and one pass: a variadic reduce."""
        adder = self._combiner("add", [x.array.element for x in xs])
        shapes = tuple(Shape(x.array.element, x.array.dims[:-1]) for x in xs)
        operands = [*xs, *(self.constant(0, shape.element) for shape in shapes)]
        attributes = packed(14, [len(shapes[0].dims)]) + packed(38, [adder])
        if len(xs) == 1:
            return [self.add("reduce", shapes[0], operands, attributes)]
        result = self.add("reduce", TupleShape(shapes), operands, attributes)
        return [self.add("get-tuple-element", shape, [result], integer(13, i)) for i, shape in enumerate(shapes)]

    def concatenate(self, scalars: Sequence[Instruction]) -> Instruction:
        """Scalars of one element type as a vector."""
        shape = Shape(scalars[0].array.element, (len(scalars),))
        return self.add("concatenate", shape, [self.reshape(x, (1,)) for x in scalars], packed(14, [0]))

    def _combiner(self, opcode: str, elements: Sequence[str]) -> int:
        """The id of a computation that combines pairs of numbers, one pair for each of these element types."""
        # Ids are unique over all computations of a module, so that this one goes on counting.
        combiner = Computation(opcode, self._ids)
        xs, ys = ([combiner.parameter(Shape(e)) for e in elements] for _ in range(2))
        results = [combiner.add(opcode, x.shape, [x, y]) for x, y in zip(xs, ys, strict=True)]
        self._called.append(combiner.encode(results[0] if len(results) == 1 else combiner.tuple(results)))
        return combiner.id

    def tuple(self, results: Sequence[Instruction]) -> Instruction:
        """The tuple of `results`, all of them arrays."""
        return self.add("tuple", TupleShape(tuple(x.array for x in results)), results)

    def signature(self, result: Shape | TupleShape) -> bytes:
        """The shapes and names of the parameters, and the shape of the result."""
        names = b"".join(message(3, f"p{i}") for i in range(len(self._parameters)))
        return b"".join(message(1, p.encode()) for p in self._parameters) + message(2, result.encode()) + names

    def encode(self, root: Instruction) -> bytes:
        """The computation that returns `root`, as bytes."""
        return (
            message(1, f"{self.name}.{self.id}")  # XLA requires a dot and a number at the end of a computation's name
            + b"".join(message(2, i) for i in self._encoded)
            + message(4, self.signature(root.shape))
            + integer(5, self.id)
            + integer(6, root.id)
        )

    def module(self, results: Sequence[Instruction]) -> bytes:
        """The bytes of a module whose entry is this computation, returning the tuple of `results`."""
        root = self.tuple(results)
        return (
            message(1, self.name)
            + message(2, f"{self.name}.{self.id}")
            + b"".join(message(3, computation) for computation in [*self._called, self.encode(root)])
            + message(4, self.signature(root.shape))
            + integer(6, self.id)
        )
