"""The two planes of a recording: tensors of the parameter's shape, which have no data, and numbers, which have."""

from __future__ import annotations

import copy
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate

NO_DIMENSIONS = (1, 1, 1, 1, 1, 1, 1)
"""The shape of the stand-in for a 0-d parameter.

A 0-d tensor counts as a number (`step`), so `exp_avg` must not be 0-d. Code that asks for the shape gets the true one
(`ShapeWatch`).
"""


def touches_meta(x: object) -> bool:
    """Returns True if `x` is a tensor of the tensor plane, or a list that contains one."""
    return any(map(is_meta, x)) if isinstance(x, (list, tuple)) else is_meta(x)


def is_meta(x: object) -> bool:
    """Returns True if `x` is on the tensor plane."""
    return isinstance(x, torch.Tensor) and x.device.type == "meta"


def is_plain(x: object) -> bool:
    """Returns True for what a shadow copies: numbers, strings, 0-d tensors, and lists, tuples or dicts of them."""
    if isinstance(x, (list, tuple)):
        return all(map(is_plain, x))
    if isinstance(x, dict):
        return all(is_plain(k) and is_plain(v) for k, v in x.items())
    return x is None or isinstance(x, (int, float, str)) or (isinstance(x, torch.Tensor) and x.dim() == 0)


def detached(x: Any) -> Any:
    """A copy of numbers, 0-d tensors, or lists of them, that later recordings do not change."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone() if x.dim() == 0 and x.device.type != "meta" else x
    return copy.deepcopy(x) if isinstance(x, (list, dict)) and is_plain(x) else x


def same_number(x: Any, y: Any) -> bool:
    """Returns True for equal values of one type."""
    return type(x) is type(y) and bool(x == y)


def check_floating(name: str, dtype: torch.dtype) -> None:
    """Raises for an integer or boolean state of the parameter's shape."""
    if not dtype.is_floating_point:
        raise UnsupportedUpdate(
            f"the update keeps optimizer.state[p][{name!r}] in {dtype}, shaped like the parameter; states are stored "
            "in floating-point formats, where counts end (at 256 in bf16) and logic is arithmetic: keep it in float32 "
            f"and store it so (strategy={{{name!r}: 'fp32', ...}}), count in a number for all elements, or leave the "
            "optimizer uncompiled"
        )
