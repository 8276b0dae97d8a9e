"""What an operation returns on tensors without data, found out once for arguments of the same shapes and types."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.passes.functionalize.recorded_ops import is_reduction
from collage_neuron.torch_privates import schema


class _Geometry(NamedTuple):
    """All that a tensor without data is."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_results: dict[Any, _Geometry] = {}


def result_without_data(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)` of meta tensors; their kernels are in Python, and a step is recorded each time."""
    # The result of an operation on each element, or of a sum, a mean or a norm, has no property but its geometry. That
    # depends on the geometry of the tensors and on the types of the numbers; of a reduction on the numbers too.
    if not _makes_one(func):
        return func(*args, **kwargs)
    told = _told if torch.Tag.pointwise in func.tags else _told_with_numbers  # of a reduction: over which dimensions
    key = func, *map(told, args), *((k, told(v)) for k, v in kwargs.items())
    known = _results.get(key)
    if known is None:
        out = func(*args, **kwargs)
        _results[key] = _Geometry(tuple(out.shape), out.stride(), out.dtype, out.device)
        return out
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=known.device)


@cache
def _makes_one(func: Any) -> bool:
    """Returns True if `func` computes one new tensor, element by element, or reduces one."""
    s = schema(func)
    aliased = any(x.alias_info is not None for x in (*s.arguments, *s.returns))
    is_known = torch.Tag.pointwise in func.tags or is_reduction(func)
    return is_known and not aliased and [str(r.type) for r in s.returns] == ["Tensor"]


def _told(x: Any) -> Any:
    """What a result depends on: not on the value of a number, which differs from step to step."""
    if isinstance(x, torch.Tensor):
        return _Geometry(tuple(x.shape), x.stride(), x.dtype, x.device)
    if isinstance(x, (int, float, complex)):
        return type(x)
    return (list, *map(_told, x)) if isinstance(x, (list, tuple)) else x


def _told_with_numbers(x: Any) -> Any:
    """What a result depends on, the values of numbers included."""
    if isinstance(x, torch.Tensor):
        return _told(x)
    return (list, *map(_told_with_numbers, x)) if isinstance(x, (list, tuple)) else (type(x), x)


# An exponent, or the order of a norm, selects the operations that they become.
_POWERS = {"aten::pow", "aten::pow_", "aten::_foreach_pow", "aten::_foreach_pow_", "aten::linalg_vector_norm"}


@cache
def is_constant_op(func: Any) -> bool:
    """Returns True if the numbers of `func` are constants of the graph: exponents, sizes, memory formats, fills."""
    return schema(func).name in _POWERS or not any(
        str(a.type) in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]", "List[Tensor]")
        and a.name not in ("self", "fill_value")
        for a in schema(func).arguments
    )
