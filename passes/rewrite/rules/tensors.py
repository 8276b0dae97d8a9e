"""Rules of whole tensors: what makes one number of all elements; and copies, conversions, tensors made of a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.reductions import ACROSS, across, mean_of, mean_to, norm_of, norm_to, sum_of, sum_to
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic
from collage_neuron.passes.rewrite.rules.table import rule

aten = torch.ops.aten


def _reduced(a: Arithmetic, reduction: Callable[[Fp32], Fp32], x: Any, dtype: torch.dtype | None) -> Fp32:
    if a.name != "fp32":
        raise UnsupportedUpdate(
            f"the update adds up all elements of a tensor, which arithmetic={a.name!r} does not define; use "
            "arithmetic='fp32'"
        )
    if dtype not in (None, torch.float32, torch.float64):
        raise UnsupportedUpdate(f"the update adds up a tensor in {dtype}; leave out dtype=")
    if lift(x).host is not None:
        raise UnsupportedUpdate("the update adds up a tensor that was filled with a number; multiply by p.numel()")
    return reduction(a.read(x))


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_all(a: Arithmetic, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum of all elements, added in double, in one order on every backend, and rounded once."""
    return _reduced(a, sum_of, x, dtype)


@rule(aten.mean.default, aten.mean.dim)
def mean_all(a: Arithmetic, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The mean of all elements: their sum in double, divided by their number."""
    return _reduced(a, mean_of, x, dtype)


@rule(aten.linalg_vector_norm.default)
def norm_all(
    a: Arithmetic, x: Any, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    """The Euclidean norm of all elements, or the sum of their magnitudes (`ord=1`); squares are exact."""
    if ord == 1:
        return _reduced(a, lambda value: sum_of(torch.abs(value)), x, dtype)
    if ord != 2:
        raise UnsupportedUpdate(f"the update takes the norm of order {ord}; there are those of order 1 and 2")
    return _reduced(a, norm_of, x, dtype)


@rule(across)
def of_processes(a: Arithmetic, x: Any, how: str, group: str) -> Any:
    """What processes have of a number, each of its part of the parameter, together."""
    if how not in ACROSS:
        raise UnsupportedUpdate(f"the update takes the {how!r} of what processes have; there are {', '.join(ACROSS)}")
    return across(a.read(x), how, group)


@rule(sum_to)
def sum_of_rows(a: Arithmetic, x: Any, extent: str) -> Any:
    """The sums over rows or columns, added in double, in one order on every backend, and rounded once."""
    return _reduced(a, lambda value: sum_to(value, extent), x, None)


@rule(mean_to)
def mean_of_rows(a: Arithmetic, x: Any, extent: str) -> Any:
    """The means over rows or columns: sums in double, divided by the numbers of their terms."""
    return _reduced(a, lambda value: mean_to(value, extent), x, None)


@rule(norm_to)
def norm_of_rows(a: Arithmetic, x: Any, extent: str) -> Any:
    """The Euclidean norms of rows or columns; squares are exact."""
    return _reduced(a, lambda value: norm_to(value, extent), x, None)


# Rules that compute nothing

CARRIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten.copy.default, aten._to_copy.default}
"""Operations whose result is their operand: a copy of the parameter is as exact as the parameter."""


DTYPES = (None, torch.float32, torch.bfloat16, torch.float64)
"""Those in which updates compute; to compute in another one would change values."""


@rule(aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def same(a: Arithmetic, x: Any, **_: Any) -> Any:
    """x itself."""
    return x


@rule(aten._to_copy.default)
def to_dtype(a: Arithmetic, x: Any, *, dtype: Any = None, **_: Any) -> Any:
    """x as another dtype: a mask becomes 0 and 1; bf16 or fp32 is the arithmetic's business, not the optimizer's."""
    if dtype not in DTYPES:
        raise UnsupportedUpdate(
            f"the update converts a tensor to {dtype}; only floating-point updates can be rewritten"
        )
    return x if lift(x).mask is None else a.read(x)


@rule(aten.copy.default)
def copy(a: Arithmetic, x: Any, source: Any, non_blocking: bool = False) -> Any:
    """The source: what was there before is overwritten."""
    return source


@rule(
    aten.zeros_like.default, aten.new_zeros.default, aten.zero.default,
    aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default,
)  # fmt: skip
def zeros(a: Arithmetic, *_: Any, dtype: Any = None, **__: Any) -> Any:
    """The number 0; and what is empty, which will be overwritten: the update would read memory that nobody wrote."""
    return _made_in(dtype, Scalar.constant(0.0))


@rule(aten.ones_like.default, aten.new_ones.default)
def ones(a: Arithmetic, *_: Any, dtype: Any = None, **__: Any) -> Any:
    """The number 1."""
    return _made_in(dtype, Scalar.constant(1.0))


@rule(aten.full_like.default, aten.full.default)
def full(a: Arithmetic, like: Any, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    """A number."""
    host = lift(value).host
    return _made_in(dtype, Scalar.constant(float(value)) if host is None else host)


@rule(aten.new_full.default)
def new_full(a: Arithmetic, like: Any, size: Any, value: Any, **named: Any) -> Any:
    """A number."""
    return full(a, like, value, **named)


def _made_in(dtype: Any, number: Scalar) -> Scalar:
    """The number that fills a tensor of that dtype."""
    if dtype not in DTYPES:
        raise UnsupportedUpdate(f"the update makes a tensor in {dtype}; only floating-point updates can be rewritten")
    return number


@rule(aten.fill.Scalar)
def fill(a: Arithmetic, x: Any, value: Any) -> Any:
    """A number: what was there before is overwritten."""
    return value
