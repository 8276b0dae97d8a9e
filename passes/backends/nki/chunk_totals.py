"""What follows a kernel of sums, by torch's operations on small tensors of the device, which has no fp64.

Sums of a tensor are put together from what the kernel of a reduction leaves of each chunk (`chunk_sums.py`). All are
multiplied by powers of two, so that they are in units of the largest chunk, and folded in pairs of fp32
(`fp32_pairs.py`); the largest unit comes back last, so that squares neither overflow nor underflow. What is neither
finite nor NaN comes from the first totals: an infinite one is the sum.

The error, before a result is rounded to fp32: of a sum 2**-37 of the sum of magnitudes, of a norm 2**-36 of itself.
From 512 terms that have lost 2**-46 each, where the largest is 2 at least; from as many squares that have lost 2**-43,
where the largest is 4; and 2**-38 from folding 2**22 numbers.

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
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two, sqrt
from collage_neuron.numerics.fp32_pairs import Pair, folded, halves, over, root, square_root
from collage_neuron.numerics.matrix_sums import DIMENSIONS, ENDINGS, mean_to, norm_to, sum_to
from collage_neuron.numerics.tensor_sums import OF_TENSOR, mean_of, norm_of, sum_of
from collage_neuron.passes.backends.nki.chunk_sums import LARGEST, LEAST
from collage_neuron.passes.backends.nki.ir import Pieces, Program
from collage_neuron.passes.backends.protocol import Measure
from collage_neuron.passes.ir.stage import Stage
from collage_neuron.passes.ir.update import Update

FINISH: Mapping[Any, Callable[[Pair, int], Pair]] = {
    **dict.fromkeys((sum_of, sum_to), lambda total, n: total),
    **dict.fromkeys((mean_of, mean_to), over),
    **dict.fromkeys((norm_of, norm_to), lambda total, n: root(total)),
}
"""What becomes of a sum, by operation."""


def sums_of(program: Program, kinds: Sequence[Any], totals: Tensor, size: int) -> Tensor:
    """The results of a reduction for parameters of so many elements: fp32, `[parameters, results]`.

    `totals` has, for each of them, the measures of each chunk: `[parameters, chunks * measures]`.
    """
    each = totals.view(len(totals), -1, len(program.measures))
    found = [_finished(pieces, kind, each, size) for pieces, kind in zip(program.sums, kinds, strict=True)]
    return torch.stack(found, dim=1)


def _finished(pieces: Pieces, kind: Any, measures: Tensor, size: int) -> Tensor:
    terms, unit = terms_of(pieces, measures, OF_TENSOR[kind].is_square)
    found = FINISH[kind](folded(terms.flatten(1)), size).hi
    plain = terms[:, 0].sum(1)
    return torch.where(plain.abs() < torch.inf, found, plain) * unit


def terms_of(pieces: Pieces, measures: Tensor, is_square: bool) -> tuple[Tensor, Tensor]:
    """The terms of sums, `[parameters, totals, chunks]`, and the unit of each (for squares: of its root)."""
    units, inverse = measures[:, :, pieces.unit], measures[:, :, pieces.inverse]
    share = units * (0.5 * inverse.amin(1, keepdim=True))  # of the largest one: a power of two, at most 1
    share = share * share if is_square else share
    terms = torch.stack([measures[:, :, k] * factor for k, factor in pieces.totals], dim=1) * share[:, None]
    return terms, 0.5 * units.amax(1)


def nothing_of(kind: Any) -> float:
    """The result for a tensor without elements."""
    return float(OF_TENSOR[kind].finish(0.0, 0))


def measure_of(update: Update, totals: Tensor) -> Measure:
    """The measurements of one parameter, from the flat totals of all chunks."""
    sums = len(update.sums)
    chunks = totals.view(-1, sums + len(update.counts))
    return Measure(_added(chunks[:, :sums]), _counted(chunks[:, sums:]))


def nothing(update: Update, device: torch.device) -> Measure:
    """The measurements of a parameter without elements."""
    dtype, whole = _types(device)
    sums, counts = len(update.sums), len(update.counts)
    return Measure(torch.zeros(sums, dtype=dtype, device=device), torch.zeros(counts, dtype=whole, device=device))


def _types(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    return (torch.float64, torch.int64) if device.type == "cpu" else (torch.float32, torch.int32)


def _added(x: Tensor) -> Tensor:
    """The sums of columns: of about as many rows as rows have numbers."""
    height = math.isqrt(len(x) - 1) + 1
    padded = torch.nn.functional.pad(x.to(_types(x.device)[0]), (0, 0, 0, -len(x) % height))
    return padded.view(-1, height, x.shape[1]).sum(1).sum(0)


def _counted(x: Tensor) -> Tensor:
    """The sums of columns of whole numbers of at most `SUMMED`: exact."""
    dtype = _types(x.device)[1]
    return x.to(dtype).sum(0, dtype=dtype)


class _Numbers(fx.Interpreter):
    """Runs a stage of numbers in fp32."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation."""
        if target in ENDINGS:
            return of_values(target, *args)
        return super().call_function(square_root if target is sqrt else target, args, kwargs)


def computed(stage: Stage, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of a stage of numbers, from the scalar vector's entries and the values that it reads."""
    found: Sequence[Tensor] = _Numbers(stage.graph).run(*given)
    return found


def of_values(operation: Any, x: Tensor, extent: str) -> Tensor:
    """The result of an operation of `ENDINGS` for values of shape (..., matrices, rows, columns)."""
    gone = [d - 3 for d in range(3) if d not in DIMENSIONS[extent]]
    shape = [1 if d - x.dim() in gone else n for d, n in enumerate(x.shape)]
    terms = x.movedim(gone, list(range(-len(gone), 0))).flatten(-len(gone))
    found = _over_last(operation, terms).reshape(shape)
    return found if DIMENSIONS[extent] or found.dim() > 3 else found.reshape(())


def _over_last(operation: Any, x: Tensor) -> Tensor:
    count, is_square = x.shape[-1], ENDINGS[operation].is_square
    if not x.numel():
        nothing: Tensor = ENDINGS[operation].finish(x.new_zeros(x.shape[:-1]), count)
        return nothing
    unit = power_of_two(x).amax(-1, keepdim=True).clamp(LEAST, LARGEST)  # of powers: it never meets a NaN
    scaled = x * inverse_power_of_two(unit)
    found = FINISH[operation](folded(_squares(scaled) if is_square else scaled), count).hi
    plain = (scaled * scaled if is_square else scaled).sum(-1)
    result: Tensor = torch.where(plain.abs() < torch.inf, found, plain) * (0.5 * unit[..., 0])
    return result


def _squares(x: Tensor) -> Tensor:
    a, b = halves(x)
    return torch.cat([a * a, 2.0 * (a * b), b * b], dim=-1)
