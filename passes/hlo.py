"""Writes an HLO module as the bytes of an `HloModuleProto`, with nothing but the standard library.

torch_xla's own builder has no reduce-precision, the one instruction that XLA may not delete, and hashes a
graph's operations without their wiring (pytorch/xla issue 8353); a module handed over as bytes has neither
problem. Field numbers: xla/service/hlo.proto and xla/xla_data.proto in openxla/xla; wire format: the protocol
buffers encoding guide.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

ELEMENT_TYPES = {"pred": 1, "s32": 4, "f32": 11, "bf16": 16}
_TUPLE = 13
_COMPUTATION = 1
"""The id of the one computation; XLA wants ids to differ among computations and instructions together."""


def varint(n: int) -> bytes:
    """Seven bits a byte, the lowest first."""
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
        layout = packed(1, range(len(self.dims) - 1, -1, -1))
        return (
            integer(2, ELEMENT_TYPES[self.element])
            + packed(3, self.dims)
            + message(5, layout)
            + packed(6, [0] * len(self.dims))
        )

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


@dataclass
class Computation:
    """An entry computation under construction; `module` gives its bytes."""

    name: str
    _encoded: list[bytes] = field(default_factory=list)
    _parameters: list[Shape] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    """The instructions so far, one line each: for people and golden tests."""

    def add(
        self,
        opcode: str,
        shape: Shape | TupleShape,
        operands: Sequence[Instruction] = (),
        attributes: bytes = b"",
    ) -> Instruction:
        """Appends an instruction; `attributes` are encoded fields of HloInstructionProto."""
        number = len(self._encoded) + _COMPUTATION + 1
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

    def constant(self, value: float) -> Instruction:
        """An fp32 scalar constant."""
        data = message(8, struct.pack("<f", value))
        return self.add("constant", Shape("f32"), attributes=message(8, message(1, Shape("f32").encode()) + data))

    def reduce_precision(self, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
        """X rounded to nearest even to a format of so many bits."""
        return self.add("reduce-precision", x.shape, [x], integer(18, exponent_bits) + integer(19, mantissa_bits))

    def compare(self, direction: str, x: Instruction, y: Instruction) -> Instruction:
        """A comparison, direction one of LT, LE, GT, GE, EQ, NE."""
        assert isinstance(x.shape, Shape)
        return self.add("compare", Shape("pred", x.shape.dims), [x, y], message(63, direction))

    def element(self, vector: Instruction, index: int, dims: tuple[int, ...]) -> Instruction:
        """vector[index], an fp32 scalar, broadcast to `dims`."""
        bounds = integer(1, index) + integer(2, index + 1) + integer(3, 1)
        entry = self.add("slice", Shape("f32", (1,)), [vector], message(17, bounds))
        return self.broadcast(self.add("reshape", Shape("f32"), [entry]), dims)

    def broadcast(self, scalar: Instruction, dims: tuple[int, ...]) -> Instruction:
        """An fp32 scalar repeated to `dims`."""
        return self.add("broadcast", Shape("f32", dims), [scalar]) if dims else scalar

    def module(self, results: Sequence[Instruction]) -> bytes:
        """The bytes of a module whose entry is this computation, returning the tuple of `results`."""
        shape = TupleShape(tuple(r.shape for r in results if isinstance(r.shape, Shape)))
        root = self.add("tuple", shape, results)
        names = b"".join(message(3, f"p{i}") for i in range(len(self._parameters)))
        signature = b"".join(message(1, p.encode()) for p in self._parameters) + message(2, shape.encode()) + names
        entry = f"{self.name}.{_COMPUTATION}"  # XLA wants a dot and a number at the end of a computation's name
        computation = (
            message(1, entry)
            + b"".join(message(2, i) for i in self._encoded)
            + message(4, signature)
            + integer(5, _COMPUTATION)
            + integer(6, root.id)
        )
        return (
            message(1, self.name)
            + message(2, entry)
            + message(3, computation)
            + message(4, signature)
            + integer(6, _COMPUTATION)
        )
