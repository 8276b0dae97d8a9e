"""What follows a kernel of sums, by torch's operations on small tensors of the device, which has no fp64.

Sums of a tensor are put together from what the kernel of a reduction leaves of each chunk (`chunk_sums.py`). All are
multiplied by powers of two, so that they are in units of the largest chunk, and folded in pairs of fp32
(`fp32_pairs.py`); the largest unit comes back last. What is neither finite nor NaN comes from the first totals: an
infinite one is the sum.

The error, before a result is rounded to fp32: of a sum 2**-37 of the sum of magnitudes, of a norm 2**-36 of itself.
From 512 terms that have lost 2**-46 each, where the largest is 2 at least; from as many squares that have lost 2**-43,
where the largest is 4; and 2**-38 from folding 2**22 numbers.

A reduction over rows, columns, matrices or all elements is one over the rows of some matrix: columns are those of the
transposed one. Such a row is cut into as few chunks as a kernel takes, of equal width, so that no chunk has two rows; a
few zeros are added to rows that this does not divide. Zeros add nothing to sums of elements or of squares, and a mean
is divided by the number of elements without them. What chunks leave of a row is put together as that of a tensor is.

Given: rows of 1031 elements, and chunks of at most 512
Result: 3 chunks of 344 elements for each row, the last of which ends with a zero

A stage of numbers computes with what stages have found; its roots are those of `fp32_pairs`, and so are sums, means and
norms of values of rows, columns and matrices. Such a sum, of n values x: all are divided by a power of two near the
largest magnitude, so that none is 4 or larger; squares are three exact products, of halves of 12 bits
(`fp32_pairs.halves`); and the terms are folded in pairs. Before the one rounding to fp32 a sum is within 2**-37 of the
sum of magnitudes, and a norm within 2**-37 of itself, for up to 2**20 values: folding loses less than 2**-38, and what
becomes subnormal less than 2**-100. What is neither finite nor NaN comes from an ordinary sum of the same terms.

A monitor's sums and counts are totals of chunks too, fp32, of at most `tiling.SUMMED` terms: no iteration of a kernel's
loops reads what another one wrote. Here they are added up: in float64 on the CPU, elsewhere in fp32, in rows and then
the sums of the rows. docs/development/evidence.md has the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics import reductions
from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two, sqrt, storage_of
from collage_neuron.numerics.fp32_pairs import Pair, folded, halves, over, root, square_root
from collage_neuron.numerics.reductions import mean_of, norm_of, sum_of
from collage_neuron.passes.backends.nki.calls import Part, call, kernel_of
from collage_neuron.passes.backends.nki.chunk_sums import LARGEST, LEAST
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.ir import Pieces, Program
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.backends.nki.tiling import Cut, Tiling
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

FINISH: Mapping[Any, Callable[[Pair, int], Pair]] = {
    **dict.fromkeys((sum_of, reductions.sum_to), lambda total, n: total),
    **dict.fromkeys((mean_of, reductions.mean_to), over),
    **dict.fromkeys((norm_of, reductions.norm_to), lambda total, n: root(total)),
}
"""What becomes of a sum, by operation."""

SQUARES = frozenset({norm_of, reductions.norm_to})
"""Operations that add up squares."""


def sums_of(program: Program, kinds: Sequence[Any], totals: Tensor, size: int) -> Tensor:
    """The results of a reduction for parameters of so many elements: fp32, `[parameters, results]`.

    `totals` has, for each of them, the measures of each chunk: `[parameters, chunks * measures]`.
    """
    each = totals.view(len(totals), -1, len(program.measures))
    found = []
    for pieces, kind in zip(program.sums, kinds, strict=True):
        terms, unit = terms_of(pieces, each, kind in SQUARES)
        # The unit comes back after the root: squares of the elements themselves might overflow or underflow.
        found.append(_chosen(FINISH[kind](folded(terms.flatten(1)), size), terms[:, 0].sum(1)) * unit)
    return torch.stack(found, dim=1)


def _chosen(found: Pair, plain: Tensor) -> Tensor:
    """What was found, or an ordinary sum that is infinite or NaN."""
    # Pairs would make NaN of an infinity, by inf - inf; an ordinary sum says which of the two it is.
    return torch.where(plain.abs() < torch.inf, found.hi, plain)


def terms_of(pieces: Pieces, measures: Tensor, is_square: bool) -> tuple[Tensor, Tensor]:
    """The terms of sums, `[parameters, totals, chunks]`, and the unit of each (for squares: of its root)."""
    units, inverse = measures[:, :, pieces.unit], measures[:, :, pieces.inverse]
    # `inverse` is 2 / unit, so its least is that of the largest chunk; a division would be approximate on the device.
    share = units * (0.5 * inverse.amin(1, keepdim=True))  # a power of two, at most 1
    share = share * share if is_square else share
    terms = torch.stack([measures[:, :, k] * factor for k, factor in pieces.totals], dim=1) * share[:, None]
    return terms, 0.5 * units.amax(1)


# Of rows, columns and matrices

X = "grad"
"""The key of what is added up: the one whose type a kernel is made for."""


class Wanted(NamedTuple):
    """A result of a reduction, for parameters of one shape."""

    operation: Any
    """A key of `ENDINGS`."""
    extent: str
    operands: Sequence[Tensor]
    """Of each parameter, in one shape: (matrices, rows, columns), fp32 or bf16."""

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the result: with a dimension for parameters, if there are several."""
        own, count = reductions.shape_of(self.extent, self.operands[0].shape), len(self.operands)
        return (count, *(own or (1, 1, 1))) if count > 1 else own


def sums_for(wanted: Sequence[Wanted], machine: Machine) -> list[Tensor]:
    """The results, by one call of kernels."""
    parts = [[_part(each, x, machine) for x in each.operands] for each in wanted]
    # Kernels of sums read no numbers of a step, so all parts are of one launch with an empty vector.
    unread = Launch(_sum(False), torch.zeros(0, dtype=torch.float32, device="cpu"), (), ())
    measured = call([unread], [part for own in parts for part in own], machine)
    return [_finished(each, own, [next(measured) for _ in own]) for each, own in zip(wanted, parts, strict=True)]


def _part(wanted: Wanted, x: Tensor, machine: Machine) -> Part:
    kernel = kernel_for(wanted.operation in SQUARES, machine, x.dtype)
    rows = rows_of(wanted.extent, x)
    lines, cut = laid_out(rows, kernel.tiling) if rows.numel() else (rows, Cut(1, 1))
    room = x.new_empty(kernel.totals(lines.shape, cut), dtype=torch.float32)
    given = {X: lines, MEASURES: room}
    return Part(0, 0, kernel, [given[a.key] for a in kernel.arguments], lines.shape, cut)


def rows_of(extent: str, x: Tensor) -> Tensor:
    """What has to be added up of (matrices, rows, columns): each row of a matrix, contiguous, is one result."""
    matrices, rows, columns = x.shape
    if extent == reductions.ROW:
        return x.reshape(matrices * rows, columns)
    if extent == reductions.COLUMN:
        return x.mT.reshape(matrices * columns, rows).contiguous()
    return x.reshape(matrices, rows * columns) if extent == reductions.MATRIX else x.reshape(1, x.numel())


def laid_out(rows: Tensor, tiling: Tiling) -> tuple[Tensor, Cut]:
    """Rows with zeros at their ends, and how to cut them: into chunks that end where a row does, and several lines."""
    count, length = rows.shape
    chunks = -(-length // tiling.chunk)
    width = -(-length // chunks)
    padded = torch.nn.functional.pad(rows, (0, chunks * width - length)) if chunks * width > length else rows
    # Several chunks of a row share a line, as long as there is more than one line (`tiling.cut_of`).
    most = min(chunks, tiling.columns // width)
    fit = [d for d in range(1, most + 1) if chunks % d == 0 and (d == 1 or count * chunks > d)]
    return padded, Cut(width * max(fit), width)


def _finished(wanted: Wanted, parts: Sequence[Part], measured: Sequence[dict[str, Tensor]]) -> Tensor:
    x = wanted.operands[0]
    if not x.numel():
        return _of_nothing(wanted.operation, x.new_zeros(wanted.shape, dtype=torch.float32), 0)
    totals = torch.cat([known[MEASURES].view(len(known[X]), -1) for known in measured])
    terms = reductions.terms_in(x.shape, reductions.ELEMENT, wanted.extent)
    return sums_of(parts[0].kernel.plan.program, [wanted.operation], totals, terms).reshape(wanted.shape)


@cache
def _sum(is_square: bool) -> Update:
    """The reduction of a tensor to its sum, or to its norm."""
    graph, kind = fx.Graph(), norm_of if is_square else sum_of
    graph.output((graph.call_function(kind, (graph.placeholder(X),)),))
    stage = Stage(REDUCTION, graph, (X,), (), (kind.__name__,))
    return Update((stage,), (X,), (), ScalarProgram(), {})


def kernel_for(is_square: bool, machine: Machine, dtype: torch.dtype) -> Kernel:
    """The kernel that adds up fp32 or bf16 elements, or their squares."""
    return kernel_of(_sum(is_square), machine, storage_of(dtype).name)


# Stages of numbers


class _Numbers(fx.Interpreter):
    """Runs a stage of numbers in fp32."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation."""
        if target in reductions.ENDINGS:
            return of_values(target, *args)
        return super().call_function(square_root if target is sqrt else target, args, kwargs)


def computed(stage: Stage, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of a stage of numbers, from the scalar vector's entries and the values that it reads."""
    found: Sequence[Tensor] = _Numbers(stage.graph).run(*given)
    return found


def of_values(operation: Any, x: Tensor, extent: str) -> Tensor:
    """The result of an operation of `ENDINGS` for values of shape (..., matrices, rows, columns)."""
    gone = [d - 3 for d in range(3) if d not in reductions.DIMENSIONS[extent]]
    shape = [1 if d - x.dim() in gone else n for d, n in enumerate(x.shape)]
    terms = x.movedim(gone, list(range(-len(gone), 0))).flatten(-len(gone))
    found = _over_last(operation, terms).reshape(shape)
    return found if reductions.DIMENSIONS[extent] or found.dim() > 3 else found.reshape(())


def _over_last(operation: Any, x: Tensor) -> Tensor:
    if not x.numel():
        return _of_nothing(operation, x.new_zeros(x.shape[:-1]), x.shape[-1])
    unit: Tensor = power_of_two(x).amax(-1, keepdim=True).clamp(LEAST, LARGEST)  # of powers: it never meets a NaN
    scaled = x * inverse_power_of_two(unit)
    terms = plain = scaled
    if operation in SQUARES:
        a, b = halves(scaled)
        # Products of halves of 12 bits are exact in the 24 bits of fp32.
        terms, plain = torch.cat([a * a, 2.0 * (a * b), b * b], dim=-1), scaled * scaled
    return _chosen(FINISH[operation](folded(terms), x.shape[-1]), plain.sum(-1)) * (0.5 * unit[..., 0])


def _of_nothing(operation: Any, zeros: Tensor, count: int) -> Tensor:
    result: Tensor = reductions.ENDINGS[operation].finish(zeros, count)
    return result


# What a monitor measures


def measure_of(update: Update, totals: Tensor) -> Measure:
    """The measurements of one parameter, from the flat totals of all chunks: of none, if it has no elements."""
    dtype, whole = (torch.float64, torch.int64) if totals.device.type == "cpu" else (torch.float32, torch.int32)
    sums = len(update.sums)
    chunks = totals.view(-1, sums + len(update.counts))
    height = math.isqrt(max(len(chunks) - 1, 0)) + 1  # of about as many rows as rows have numbers
    padded = torch.nn.functional.pad(chunks[:, :sums].to(dtype), (0, 0, 0, -len(chunks) % height))
    # counts are whole numbers of at most SUMMED: exact
    return Measure(padded.view(-1, height, sums).sum(1).sum(0), chunks[:, sums:].to(whole).sum(0, dtype=whole))
