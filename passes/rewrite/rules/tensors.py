"""Rules that compute nothing: copies, conversions, and tensors that are made of a number."""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic
from collage_neuron.passes.rewrite.rules.registry import rule

aten = torch.ops.aten

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


@rule(aten.zeros_like.default, aten.new_zeros.default, aten.zero.default)
def zeros(a: Arithmetic, *_: Any, dtype: Any = None, **__: Any) -> Any:
    """The number 0."""
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


@rule(aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default)
def empty(a: Arithmetic, *_: Any, dtype: Any = None, **__: Any) -> Any:
    """A number, which will be overwritten: the update would read memory that nobody wrote."""
    return _made_in(dtype, Scalar.constant(0.0))


def _made_in(dtype: Any, number: Scalar) -> Scalar:
    """The number that fills a tensor of that dtype."""
    if dtype not in DTYPES:
        raise UnsupportedUpdate(f"the update makes a tensor in {dtype}; only floating-point updates can be rewritten")
    return number


@rule(aten.fill.Scalar)
def fill(a: Arithmetic, x: Any, value: Any) -> Any:
    """A number: what was there before is overwritten."""
    return value
