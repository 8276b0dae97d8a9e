"""Computes with what stages have found, by torch's operations on small tensors of the device, which has no fp64.

Roots are those of `fp32_pairs`, and so are sums, means and norms of values of rows, columns and matrices.

Such a sum, of n values x: all are divided by a power of two near the largest magnitude, so that none is 4 or larger;
squares are three exact products, of halves of 12 bits (`fp32_pairs.halves`); and the terms are folded in pairs. Before
the one rounding to fp32 a sum is within 2**-37 of the sum of magnitudes, and a norm within 2**-37 of itself, for up to
2**20 values: folding loses less than 2**-38 (`fp32_pairs`, 2**22 terms), and what becomes subnormal less than 2**-100.
What is neither finite nor NaN comes from an ordinary sum of the same terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two, sqrt
from collage_neuron.numerics.fp32_pairs import Pair, folded, halves, over, root, square_root
from collage_neuron.numerics.matrix_sums import DIMENSIONS, ENDINGS, mean_to, norm_to, sum_to
from collage_neuron.passes.backends.nki.chunk_sums import LARGEST, LEAST
from collage_neuron.passes.ir.stage import Stage

FINISH: Mapping[Any, Callable[[Pair, int], Pair]] = {
    sum_to: lambda total, n: total,
    mean_to: over,
    norm_to: lambda total, n: root(total),
}
"""What becomes of a sum, by operation."""


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
        return ENDINGS[operation].finish(x.new_zeros(x.shape[:-1]), count)
    unit = power_of_two(x).amax(-1, keepdim=True).clamp(LEAST, LARGEST)  # of powers: it never meets a NaN
    scaled = x * inverse_power_of_two(unit)
    found = FINISH[operation](folded(_squares(scaled) if is_square else scaled), count).hi
    plain = (scaled * scaled if is_square else scaled).sum(-1)
    result: Tensor = torch.where(plain.abs() < torch.inf, found, plain) * (0.5 * unit[..., 0])
    return result


def _squares(x: Tensor) -> Tensor:
    a, b = halves(x)
    return torch.cat([a * a, 2.0 * (a * b), b * b], dim=-1)
