"""The data types of a kernel under construction: columns of per-step numbers, values (one tile each), instructions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collage_neuron.numerics.eft import STORAGE_TYPES, inverse_power_of_two, power_of_two, sqrt
from collage_neuron.numerics.fp32_pairs import square_root

MASK = "uint8"
"""The dtype of a value that is 0 or 1, as required of predicates."""


def itemsize(dtype: str) -> int:
    """Bytes of an element, by the name `nki.language` gives the dtype."""
    return 1 if dtype == MASK else next(t.bytes for t in STORAGE_TYPES.values() if t.nki == dtype)


SYMBOLS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A number of the step, the same for every element: one column of the kernel's `[128, K]` fp32 input.

    `entry` is a place in the update's scalar vector; else `target` is applied to `args`, in fp32, on the host, which
    is what the reference backend does with two scalars. If it is `found`, earlier stages give it, for each parameter:
    it is an entry behind those of the scalar vector, and so is what is computed from it, on the device.
    """

    entry: int = -1
    target: Callable[..., Any] | None = None
    args: tuple[Column | float, ...] = ()
    found: bool = False

    @property
    def is_found(self) -> bool:
        """Returns True if it is a number that earlier stages find, or is computed from one."""
        return self.found or any(isinstance(a, Column) and a.is_found for a in self.args)

    def value(self, vector: Sequence[torch.Tensor]) -> torch.Tensor:
        """The number, a 0-d fp32 tensor, from the entries of the scalar vector; if these are 1-D, so is it."""
        if self.target is None:
            return vector[self.entry]
        args: list[Any] = [a.value(vector) if isinstance(a, Column) else a for a in self.args]
        if self.target is torch.where:
            args[0] = args[0] != 0  # a comparison is kept as 0 or 1
        target = square_root if self.is_found and self.target is sqrt else self.target  # a device has no fp64
        result = target(*args)
        return torch.as_tensor(result, dtype=torch.float32)

    def entries(self) -> frozenset[int]:
        """Indices of the entries of the scalar vector from which the number is computed."""
        inner = [a.entries() for a in self.args if isinstance(a, Column)]
        return frozenset({self.entry}) if self.target is None else frozenset().union(*inner)

    def text(self, entries: Sequence[str]) -> str:
        """The number as text, given the texts of the scalar vector's entries."""
        if self.target is None:
            return entries[self.entry]
        args = [a.text(entries) if isinstance(a, Column) else repr(a) for a in self.args]
        if self.target not in SYMBOLS:
            return f"{'-' if self.target is operator.neg else self.target.__name__}({', '.join(args)})"
        nested = (isinstance(a, Column) and a.target in SYMBOLS for a in self.args)
        return f" {SYMBOLS[self.target]} ".join(f"({x})" if y else x for x, y in zip(args, nested, strict=True))


# Equal by identity: a value is a tile, and one that is changed in place is not another that was computed alike.
@dataclass(frozen=True, eq=False)
class Value:
    """The contents of one tile: the result of `op`, rounded once, to `dtype`."""

    op: str
    """The name of an `nki.language` operator, or load, copy, own_copy, fill, select, clamp, exact_reciprocal.

    Or, of numbers that are put together of two halves: limit_places, lower, upper. Or block_max. Or total and peak: the
    sum of a chunk and its largest element, a number in each partition. Or draw: 16 random bits, as a number from 0 to
    65535.
    """
    args: tuple[Operand, ...]
    dtype: str
    name: str
    block: bool = False
    """True if it has one element for each block of elements."""
    chunk: bool = False
    """True if it has one element for each chunk, in each partition; if it is a measure, it lies with the others."""

    @property
    def is_small(self) -> bool:
        """Returns True if it has fewer elements than a chunk."""
        return self.block or self.chunk

    def tiles(self) -> Iterator[Value]:
        """The operands that are tiles, or views of such."""
        return (x.tile if isinstance(x, (View, Spread)) else x for x in self.args if isinstance(x, Tile))


@dataclass(frozen=True)
class View:
    """A tile as int16: a bf16 one as its bits, an fp32 one as the lower or the upper halves of its bits."""

    tile: Value
    half: int | None = None
    """0 is the lower half, 1 the upper one (engines are little-endian)."""
    dtype: str = "int16"
    """Or uint16."""


@dataclass(frozen=True)
class Spread:
    """A tile of one fp32 number for each block or chunk, as the number that its elements are combined with.

    An instruction takes such a number as it takes a number of the step: one element in each partition. So it runs once
    for each block, or for the chunk. No operand is broadcast along the free dimension, for which the older dialect has
    no way.
    """

    tile: Value


Tile = (Value, View, Spread)
"""The operands that are tiles, or parts of such."""

Operand = Value | View | Spread | Column | float

IN_PLACE = {"select": 2, "limit_places": 0, "upper": 0}
"""Operations that change the tile of an operand, by the index of that operand."""

HALVES = {"limit_places": 0, "lower": 0, "upper": 1, "carried": None}
"""Operations that write one half of the bits of each element of their tile, or (None) all bits of a bf16 one."""


class Pieces(NamedTuple):
    """The parts of one sum that a kernel finds of each chunk (`chunk_sums.py`), as indices of measures."""

    unit: int
    """A power of two, by which the elements of a chunk were divided."""
    inverse: int
    """Twice its inverse."""
    totals: tuple[tuple[int, float], ...]
    """Sums and their factors, the largest first."""


@dataclass(frozen=True)
class Program:
    """An update as values: loads, computed values in order, and stores."""

    loads: tuple[Value, ...]
    phases: Mapping[Value, int]
    """The computed values, operands first, and the phase of each (see `schedule.py`)."""
    stores: Mapping[str, Value]
    """By component key."""
    nonnegative: frozenset[int]
    """Entries of the scalar vector that must not be negative, since the range of a divisor was proven from that."""
    measures: tuple[Value, ...] = ()
    """What is found of each chunk: the sums and counts of an update that measures itself, in order; or the values of
    `sums`, for which the kernel of a reduction is made."""
    divisors: tuple[Operand, ...] = ()
    """For each divisor that is shown to be positive a number of the step that it is not below."""
    sums: tuple[Pieces, ...] = ()
    """Of a reduction: the pieces of each sum, in order."""

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values for which all others are computed."""
        return (*self.stores.values(), *self.measures)

    @property
    def values(self) -> tuple[Value, ...]:
        """The computed values, operands first."""
        return tuple(self.phases)


@dataclass(frozen=True)
class Instruction:
    """One engine instruction. `fields` are the arguments of the `nki.isa` function of that name, except `dst`."""

    kind: str
    engine: str
    fields: tuple[tuple[str, Any], ...]
    """(argument, Value | Column | number | name of an operator | True) pairs."""
    bits: str = ""
    """The integer type as which it takes its tiles, and writes its own, if it works on their bits."""
    whole: bool = False
    """True for the largest element of a chunk, instead of one for each of its blocks."""

    def __getitem__(self, field: str) -> Any:
        return dict(self.fields).get(field)

    def operands(self) -> tuple[Value | View, ...]:
        """The tiles and views that it reads, except the tile that it changes in place."""
        return tuple(x for _, x in self.fields if isinstance(x, (Value, View)))

    def reads(self) -> tuple[Value, ...]:
        """The tiles that it reads, except the one that it changes in place."""
        found = (x.tile if isinstance(x, (View, Spread)) else x for _, x in self.fields)
        return tuple(x for x in found if isinstance(x, Value))

    @property
    def by_block(self) -> bool:
        """Returns True if it runs once for each block of a chunk."""
        blocks = self.kind == "tensor_reduce" and self["op"] != "add" and not self.whole
        return blocks or any(isinstance(x, Spread) and x.tile.block for _, x in self.fields)


BINARY: Mapping[Any, str] = {
    operator.add: "add", operator.sub: "subtract", operator.mul: "multiply",
    torch.maximum: "maximum", torch.minimum: "minimum", torch.pow: "power",
    operator.lt: "less", operator.le: "less_equal", operator.gt: "greater", operator.ge: "greater_equal",
    operator.eq: "equal", operator.ne: "not_equal",
    torch.logical_or: "logical_or", torch.logical_and: "logical_and",
}  # fmt: skip
UNARY: Mapping[Any, str] = {torch.abs: "abs", torch.sign: "sign", torch.exp: "exp"}

MASKS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_or", "logical_and"})
"""Operators whose result is 0 or 1, stored as uint8, as required of predicates."""

POWERS = {power_of_two: "power_of_two", inverse_power_of_two: "inverse_power_of_two"}
"""Operations on the bits of the exponent. That of a bf16 number is a bf16 number, so that its tile stays narrow."""

MIRRORED = {
    **{op: op for op in ("add", "multiply", "maximum", "minimum", "equal", "not_equal", "logical_or", "logical_and")},
    "less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal",
}  # fmt: skip
"""The operator that gives the same result with its operands exchanged."""


def number(x: float) -> str:
    """A number as a literal; powers of two as `2.0**n` unless their decimal is short, bits in hexadecimal."""
    if isinstance(x, int):
        return f"0x{x:X}"
    mantissa, exponent = math.frexp(x)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and len(repr(x)) > 6 else repr(float(x)).replace("e+", "e")


def nonnegative(x: Operand) -> frozenset[int] | None:
    """The entries of the scalar vector whose non-negativity proves that of x; None if there is no proof."""
    if isinstance(x, Column):
        # The host checks entries of the vector: it can conclude something of these and of their reciprocals alone.
        plain = x.target is None or (x.target is operator.truediv and x.args[0] == 1.0)
        return x.entries() if plain and not x.is_found else None  # the host does not see what stages find
    if isinstance(x, View):
        return None
    if isinstance(x, Spread):
        return nonnegative(x.tile)
    if not isinstance(x, Value):
        return frozenset() if x >= 0 else None
    if x.op in ("sqrt", "exp", "abs", "reciprocal", "block_max", *POWERS.values()) or x.op in MASKS:
        return frozenset()
    proofs = [nonnegative(a) for a in _unpaired(x)]
    if x.op == "maximum":
        return next((p for p in proofs if p is not None), None)
    if x.op not in ("add", "multiply", "minimum", "clamp", "copy", "own_copy", "fill", "select") or None in proofs:
        return None
    return frozenset().union(*(p for p in proofs if p is not None))


def _unpaired(x: Value) -> list[Operand]:
    """The operands of `x`; for a product, its factors without pairs of equal ones: of (g * c) * g only c."""
    if x.op != "multiply":
        return list(x.args)
    left: list[Operand] = []
    for a in x.args:
        for factor in _unpaired(a) if isinstance(a, Value) and a.op == "multiply" else [a]:
            pair = next((i for i, f in enumerate(left) if _same(f, factor)), None)
            left = [*left, factor] if pair is None else [*left[:pair], *left[pair + 1 :]]
    return left


def _same(x: Operand, y: Operand) -> bool:
    """Returns True for the same tile, the same number of the step, and the same number (0.0 is not -0.0)."""
    return x is y or (not isinstance(x, Tile) and repr(x) == repr(y))
