"""Sums over the rows of matrices, from the kernel that finds sums of chunks (`chunk_sums.py`): no chunk has two rows.

A reduction over rows, columns, matrices or all elements is one over the rows of some matrix: columns are those of the
transposed one. Such a row is cut into as few chunks as a kernel takes, of equal width; a few zeros are added to
rows that this does not divide. Zeros add nothing to sums of elements or of squares, and a mean is divided by the number
of elements without them. What chunks leave of a row is put together as that of a whole tensor is, so the errors are
those of `chunk_totals.py`: of a sum 2**-37 of the sum of magnitudes in its row, of a norm 2**-36 of itself.

Given: rows of 1031 elements, and chunks of at most 512
Result: 3 chunks of 344 elements for each row, the last of which ends with a zero
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.matrix_sums import (
    COLUMN,
    ELEMENT,
    ENDINGS,
    MATRIX,
    ROW,
    mean_to,
    norm_to,
    shape_of,
    sum_to,
    terms_in,
)
from collage_neuron.numerics.storage import storage_of
from collage_neuron.numerics.tensor_sums import mean_of, norm_of, sum_of
from collage_neuron.passes.backends.nki.calls import Part, call, kernel_of
from collage_neuron.passes.backends.nki.chunk_totals import nothing_of, sums_of
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.backends.nki.tiling import Cut, Tiling
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

OF_ROW: Mapping[Any, Any] = {sum_to: sum_of, mean_to: mean_of, norm_to: norm_of}
"""Of each operation the one of a tensor, which a row is here."""

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
        own, count = shape_of(self.extent, self.operands[0].shape), len(self.operands)
        return (count, *(own or (1, 1, 1))) if count > 1 else own


def sums_for(wanted: Sequence[Wanted], machine: Machine) -> list[Tensor]:
    """The results, by one call of kernels."""
    parts = [[_part(each, x, machine) for x in each.operands] for each in wanted]
    unread = Launch(_sum(False), torch.zeros(0, dtype=torch.float32, device="cpu"), (), ())
    measured = call([unread], [part for own in parts for part in own], machine)
    return [_finished(each, own, [next(measured) for _ in own]) for each, own in zip(wanted, parts, strict=True)]


def _part(wanted: Wanted, x: Tensor, machine: Machine) -> Part:
    kernel = kernel_for(ENDINGS[wanted.operation].is_square, machine, x.dtype)
    rows = rows_of(wanted.extent, x)
    lines, cut = laid_out(rows, kernel.tiling) if rows.numel() else (rows, Cut(1, 1))
    room = x.new_empty(kernel.totals(lines.shape, cut), dtype=torch.float32)
    given = {X: lines, MEASURES: room}
    return Part(0, 0, kernel, [given[a.key] for a in kernel.arguments], lines.shape, cut)


def rows_of(extent: str, x: Tensor) -> Tensor:
    """What has to be added up of (matrices, rows, columns): each row of a matrix, contiguous, is one result."""
    matrices, rows, columns = x.shape
    if extent == ROW:
        return x.reshape(matrices * rows, columns)
    if extent == COLUMN:
        return x.mT.reshape(matrices * columns, rows).contiguous()
    return x.reshape(matrices, rows * columns) if extent == MATRIX else x.reshape(1, matrices * rows * columns)


def laid_out(rows: Tensor, tiling: Tiling) -> tuple[Tensor, Cut]:
    """Rows with zeros at their ends, and how to cut them: into chunks that end where a row does, and several lines."""
    count, length = rows.shape
    chunks = -(-length // tiling.chunk)
    width = -(-length // chunks)
    padded = torch.nn.functional.pad(rows, (0, chunks * width - length)) if chunks * width > length else rows
    most = min(chunks, tiling.columns // width)
    fit = [d for d in range(1, most + 1) if chunks % d == 0 and (d == 1 or count * chunks > d)]
    return padded, Cut(width * max(fit), width)


def _finished(wanted: Wanted, parts: Sequence[Part], measured: Sequence[dict[str, Tensor]]) -> Tensor:
    kind, x = OF_ROW[wanted.operation], wanted.operands[0]
    if not x.numel():
        return x.new_full(wanted.shape, nothing_of(kind), dtype=torch.float32)
    totals = torch.cat([known[MEASURES].view(len(known[X]), -1) for known in measured])
    terms = terms_in(x.shape, ELEMENT, wanted.extent)
    return sums_of(parts[0].kernel.plan.program, [kind], totals, terms).reshape(wanted.shape)


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
