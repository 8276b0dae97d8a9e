"""Reductions over tensors, rows and columns as HLO: the additions of `numerics.reductions`, in their order.

Each is an `add` of two slices: XLA may do a `reduce` in any order. For a row of three runs of 128 elements, and a sum::

    f32[3,8] slice(rows)         the elements 0 to 7 of each run; then 8 to 15, ... up to 120 to 127
    f64[3,8] convert             a product of two of these is exact, so that nothing changes if XLA contracts it
    f64[3,8] add(add(..), ..)    the lanes
    f64[3,4] add, f64[3,2] add, f64[3,1] add
    f64[4,1] pad, f64[2,1] add, f64[1,1] add

Arrays are cut up in fp32: XLA's CPU compiler then makes one loop over them, and takes four times as long otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from collage_neuron.numerics.reductions import (
    COLUMN,
    DIMENSIONS,
    DOWN,
    ELEMENT,
    ENDINGS,
    LANES,
    OF_TENSOR,
    RUN,
    RUNS,
    mean_of,
    mean_to,
    norm_of,
    norm_to,
    power_from,
    sum_of,
    sum_to,
    terms_in,
)
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape

Finish = Callable[[Computation, Instruction, Instruction], Instruction]


def _mean(hlo: Computation, sums: Instruction, count: Instruction) -> Instruction:
    return hlo.on("divide", sums, hlo.stretch(count, sums.array.dims))


def _root(hlo: Computation, sums: Instruction, count: Instruction) -> Instruction:
    return hlo.on("sqrt", sums)


FINISH: Mapping[Any, Finish | None] = {
    sum_of: None, mean_of: _mean, norm_of: _root, sum_to: None, mean_to: _mean, norm_to: _root,
}  # fmt: skip
"""What becomes of a sum in fp64: `finish` of the reductions in `OF_TENSOR` and `ENDINGS`."""


class Adder:
    """Writes the additions of one computation."""

    def __init__(self, hlo: Computation, zero: Instruction) -> None:
        """`zero` is a parameter, f32[1], that is 0: XLA multiplies by the reciprocal of a divisor that it knows."""
        self.hlo, self._zero = hlo, zero

    def kept(self, x: Instruction) -> Instruction:
        """An fp32 array itself, by an operation on its bits that XLA does not know to change nothing."""
        hlo = self.hlo
        zero = hlo.stretch(hlo.reshape(hlo.bits(self._zero), ()), x.array.dims)
        return hlo.from_bits(hlo.on("xor", hlo.bits(x), zero))

    def _apart(self, x: Instruction) -> Instruction:
        # XLA finishes all elements before any is added: else each of the slices would compute its own.
        return self.hlo.on("opt-barrier", x)

    def whole(self, operation: Any, x: Instruction) -> Instruction:
        """The result of an operation of `OF_TENSOR`: f32[], of an f32 array."""
        count = math.prod(x.array.dims)
        if not count:
            return self._finished(operation, self.hlo.constant(0, "f64"), 0)
        x = self._apart(x)
        runs = self._runs(self.hlo.reshape(x, (count,)), OF_TENSOR[operation].is_square)
        groups = -(-runs.array.dims[0] // RUNS)
        padded = self._padded(runs, 0, groups * RUNS)
        sums = self._folded(self._folded(self.hlo.reshape(padded, (groups, RUNS)), 1), 0)
        return self._finished(operation, self._no_negative_zero(self.hlo.reshape(sums, ())), count)

    def of_elements(self, operation: Any, x: Instruction, extent: str) -> Instruction:
        """The result of an operation of `ENDINGS` for elements, f32 of shape (matrices, rows, columns)."""
        count = terms_in(x.array.dims, ELEMENT, extent)
        if 0 in x.array.dims:
            return self._left(operation, self.hlo.stretch(self.hlo.constant(0, "f64"), x.array.dims), extent, count)
        x = self._apart(x)
        add, dim = (self._down, 1) if extent == COLUMN else (self._runs, 2)
        sums = self._folded(add(x, ENDINGS[operation].is_square), dim)
        return self._left(operation, self._no_negative_zero(sums), extent, count)

    def of_sums(self, operation: Any, x: Instruction, extent: str) -> Instruction:
        """The same for values of rows, columns or matrices."""
        count = math.prod(n for d, n in enumerate(x.array.dims) if d not in DIMENSIONS[extent])
        return self._left(operation, self._terms(x, ENDINGS[operation].is_square), extent, count)

    def _left(self, operation: Any, sums: Instruction, extent: str, count: int) -> Instruction:
        """What is left when all but the dimensions of `extent` are added up."""
        # Columns, rows and then matrices, as in `reductions.finished`: another order has other bits.
        for d in (2, 1, 0):
            sums = sums if d in DIMENSIONS[extent] else self._folded(sums, d)
        return self._finished(operation, sums if DIMENSIONS[extent] else self.hlo.reshape(sums, ()), count)

    def _finished(self, operation: Any, sums: Instruction, count: int) -> Instruction:
        hlo, finish = self.hlo, FINISH[operation]
        if finish is not None:
            # Plus a zero that XLA does not know: else it would multiply by the reciprocal of the count.
            known = hlo.constant(count, "f64")
            zero = hlo.reshape(hlo.add("convert", Shape("f64", (1,)), [self._zero]), ())
            sums = finish(hlo, sums, hlo.on("add", zero, known))
        return hlo.add("convert", Shape("f32", sums.array.dims), [sums])

    def _terms(self, x: Instruction, is_square: bool) -> Instruction:
        terms = self.hlo.add("convert", Shape("f64", x.array.dims), [x])
        return self.hlo.on("multiply", terms, terms) if is_square else terms

    def _runs(self, x: Instruction, is_square: bool) -> Instruction:
        """`reductions.run_sums`, along the last dimension of fp32 elements."""
        *others, size = x.array.dims
        count = -(-size // RUN)
        runs = self.hlo.reshape(self._padded(x, len(others), count * RUN), (*others, count, RUN))
        lanes = self._one_after_another(runs, LANES, min(size, RUN), is_square)
        return self.hlo.reshape(self._folded(lanes, len(others) + 1), (*others, count))

    def _down(self, x: Instruction, is_square: bool) -> Instruction:
        """`reductions.down_columns`, of fp32 elements (matrices, rows, columns)."""
        matrices, rows, columns = x.array.dims
        groups = -(-rows // DOWN)
        lines = self.hlo.reshape(self._padded(x, 1, groups * DOWN), (matrices, groups, DOWN * columns))
        sums = self._one_after_another(lines, columns, min(rows, DOWN) * columns, is_square)
        return self.hlo.reshape(sums, (matrices, groups, columns))

    def _one_after_another(self, x: Instruction, step: int, until: int, is_square: bool) -> Instruction:
        """Adds parts of `step` elements of the last dimension. Only zeros are beyond `until`, which change nothing."""
        dim = len(x.array.dims) - 1
        parts = (self._terms(self.hlo.part(x, dim, i, step), is_square) for i in range(0, until, step))
        return reduce(partial(self.hlo.on, "add"), parts)

    def _folded(self, x: Instruction, dim: int) -> Instruction:
        """`reductions.folded_over`: the sums over a dimension, which is one element long then."""
        size = x.array.dims[dim]
        if not size:
            one = tuple(1 if d == dim else n for d, n in enumerate(x.array.dims))
            return self.hlo.stretch(self.hlo.constant(0, "f64"), one)
        padded = x = self._padded(given := x, dim, power_from(size))
        while half := x.array.dims[dim] // 2:
            x = self.hlo.on("add", self.hlo.part(x, dim, 0, half), self.hlo.part(x, dim, half, half))
        # The zeros that were added make 0 of a sum of -0, unless XLA leaves these additions out.
        return x if padded is given else self._no_negative_zero(x)

    def _padded(self, x: Instruction, dim: int, size: int) -> Instruction:
        missing = size - x.array.dims[dim]
        return self.hlo.pad(x, missing, dim) if missing else x

    def _no_negative_zero(self, x: Instruction) -> Instruction:
        # 0 for -0, which is what adding 0 gives; but XLA leaves out an addition of what it knows to be 0.
        return self.hlo.select(self.hlo.compare("EQ", x, 0), 0, x)
