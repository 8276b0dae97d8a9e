"""Sums of elements, and of their squares, in the kernel of a reduction: of each chunk exact in any order of additions.

No engine has fp64, and in which order `tensor_reduce` adds is not documented. So elements are cut into pieces of so few
bits that fp32 holds all sums of 512 of them: a piece is what is left of x in `(x + C) - C`, a multiple of the last
place of C, and x minus the piece is exact. Before that, the elements of a chunk are divided by a power of two near the
largest magnitude in their partition, so that none is 4 or larger, and the same constants fit all.

Given: `norm_of(x)`, of a chunk x of 512 elements in each partition
Result: `unit = clamp(max(power_of_two(x)), 2**-126, 2**127);  x' = x * (2 / unit);  h = piece(x', -9);  l = x' - h`,
    and the sums of the pieces of h * h, of h * l (which count twice), and of l * l: x' * x' is h*h + 2*h*l + l*l

What is lost of a term of a sum is at most 2**-46, where the largest of the chunk is 2 or more; of a square 2**-43,
where the largest is 4 or more. A NaN or an infinity passes into the first of the sums, which is NaN or infinite then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch.fx as fx

from collage_neuron.numerics.reductions import OF_TENSOR
from collage_neuron.passes.backends.nki.ir import Pieces, Program, Spread, Value
from collage_neuron.passes.backends.nki.legalize import Builder
from collage_neuron.passes.backends.nki.tiling import SUMMED
from collage_neuron.passes.ir.update import Update

New = Callable[..., Value]
"""Makes a value: its operation, operands, dtype and name, and whether it is one of chunks."""

LEAST, LARGEST = 2.0**-126, 2.0**127
"""Units: those of all numbers, but for subnormal ones, infinities and NaN."""

assert SUMMED == 512  # what the exponents below are derived from: 9 bits of 24 are for the sum


Totals = list[tuple[Value, float]]
"""Totals of a chunk, or what they add up, and their factors: the largest first."""


def sum_of_chunk(new: New, x: Value, is_square: bool, name: str) -> tuple[Value, Value, Totals]:
    """The sum of the elements of x, fp32 or bf16, or of their squares: unit, twice its inverse, and totals."""
    maker = _Maker(new, name)
    power = new("power_of_two", (x,), x.dtype, f"{name}_power")
    peak = new("peak", (power,), "float32", f"{name}_peak", chunk=True)  # of powers: its maximum never meets a NaN
    clamped = new("clamp", (peak, LEAST, LARGEST), "float32", f"{name}_clamped", chunk=True)
    unit = new("copy", (clamped,), "float32", f"{name}_unit", chunk=True)
    inverse = new("inverse_power_of_two", (clamped,), "float32", f"{name}_inverse", chunk=True)
    scaled = maker.apply("multiply", x, Spread(inverse))
    totals = maker.elements(scaled) if not is_square else maker.squares(scaled, is_short=x.dtype == "bfloat16")
    return unit, inverse, [(maker.total(piece), factor) for piece, factor in totals]


class _Maker:
    """Writes the values of one sum."""

    def __init__(self, new: New, name: str) -> None:
        self._new, self._name = new, name

    def apply(self, op: str, x: Value, y: Value | Spread | float) -> Value:
        return self._new(op, (x, y), "float32", self._name)

    def total(self, x: Value) -> Value:
        return self._new("total", (x,), "float32", self._name, chunk=True)

    def piece(self, x: Value, place: int) -> Value:
        """x rounded to a multiple of 2**place; |x| is at most 2**(place + 22)."""
        # Of 1.5 times the power of two, sums with x of either sign have one exponent, and so the last place 2**place.
        constant = 1.5 * 2.0 ** (place + 23)
        return self.apply("subtract", self.apply("add", x, constant), constant)

    def cut(self, x: Value, *places: int) -> list[Value]:
        """Pieces of x: multiples of 2**place each, of what the ones before have left."""
        pieces: list[Value] = []
        for place in places:
            x = self.apply("subtract", x, pieces[-1]) if pieces else x
            pieces.append(self.piece(x, place))
        return pieces

    def elements(self, x: Value) -> Totals:
        """|x| < 4 = 2**2: multiples of 2**(2 + 9 - 24), and what is left is half of that."""
        return [(piece, 1.0) for piece in self.cut(x, -13, -29, -45)]

    def squares(self, x: Value, is_short: bool) -> Totals:
        """Of x of 8 bits the square is exact; of others it is the sum of three products, of which two are."""
        if is_short:
            return [(piece, 1.0) for piece in self.cut(self.apply("multiply", x, x), -11, -27, -43)]
        high = self.piece(x, -9)
        low = self.apply("subtract", x, high)  # at most 2**-10
        square, cross, last = (self.apply("multiply", a, b) for a, b in ((high, high), (high, low), (low, low)))
        first = self.piece(square, -11)
        second = self.apply("subtract", square, first)  # a multiple of 2**-18, at most 2**-12
        third = self.piece(cross, -23)  # the product is at most 2**-8
        rest = self.apply("add", self.apply("multiply", self.apply("subtract", cross, third), 2.0), last)
        return [(first, 1.0), (second, 1.0), (third, 2.0), *((p, 1.0) for p in self.cut(rest, -34, -50))]


def reduction_of(update: Update, storage: Mapping[str, str]) -> Program:
    """The values of a reduction stage, which is all of `update` (one of `Update.parts`).

    Raises:
        UnsupportedUpdate: an operation has no instruction.
    """
    return _Reduction(update, storage).reduced()


class _Reduction(Builder):
    """Translates the graph of a reduction."""

    def reduced(self) -> Program:
        """What is found of each chunk."""
        self.users, sums, self.measures = set(self.nodes), [], list[Value]()
        for node in self.nodes:
            if node.target in OF_TENSOR:
                sums.append(self._sum(node))
            else:
                self.translate(node)
        return replace(self.reachable({}, self.measures), sums=tuple(sums))

    def _sum(self, node: fx.Node) -> Pieces:
        x = self.each(node)
        if x.dtype not in ("float32", "bfloat16"):
            x = self.new("copy", (x,), "float32", f"{node.name}_wide")
        unit, inverse, totals = sum_of_chunk(self.new, x, OF_TENSOR[node.target].is_square, node.name)
        self.measures += [v for v in dict.fromkeys((unit, inverse, *(v for v, _ in totals))) if v not in self.measures]
        at = self.measures.index
        return Pieces(at(unit), at(inverse), tuple((at(v), factor) for v, factor in totals))
