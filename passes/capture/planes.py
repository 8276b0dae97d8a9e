"""The two planes of a recording: tensors of the parameter's shape, which have no data, and numbers, which have."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from itertools import chain
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.device_numbers import is_device_number

NO_DIMENSIONS = (1, 1, 1, 1, 1, 1, 1)
"""The shape of the stand-in for a 0-d parameter.

A 0-d tensor counts as a number (`step`), so `exp_avg` must not be 0-d. Code that asks for the shape gets the true one
(`ShapeWatch`).
"""


NUMBERS = frozenset({type(None), bool, int, float, str})
"""Types of which every object is a number or a text for good: nothing to look into, and nothing to copy."""


def touches_meta(x: object) -> bool:
    """Returns True if `x` is a tensor of the tensor plane, or a list that contains one."""
    # A stand-in is asked for its class (`StandIn.__class__`) by isinstance with any other class than its own.
    if isinstance(x, torch.Tensor):
        return x.is_meta
    return isinstance(x, (list, tuple)) and any(map(touches_meta, x))


def is_meta(x: object) -> bool:
    """Returns True if `x` is on the tensor plane."""
    return isinstance(x, torch.Tensor) and x.is_meta


def meta_in(names: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    """The tensors of the tensor plane among `names`."""
    return {k: v for k, v in names.items() if isinstance(v, torch.Tensor) and v.is_meta}


def holders_of_meta(places: Mapping[str, Mapping[Any, Any]]) -> list[tuple[str, bool]]:
    """Where a tensor of the tensor plane is, or is in a container, or a number that was read from one.

    The keys of `places` have a {} for that name; with each place comes True if there is such a number.
    """
    found = [(place, k, x) for place, names in places.items() for k, x in names.items() if type(x) not in NUMBERS
             and _holds(_is_of_tensors, x)]  # fmt: skip
    return [(place.format(k), _holds(is_device_number, x)) for place, k, x in found]


def _is_of_tensors(x: object) -> bool:
    return is_meta(x) or is_device_number(x)


def _holds(is_one: Callable[[Any], bool], x: Any) -> bool:
    if type(x) in NUMBERS:
        return False
    if isinstance(x, Mapping):
        return any(_holds(is_one, y) for y in chain(x.keys(), x.values()))
    if isinstance(x, (list, tuple, set, frozenset, deque, KeysView, ValuesView, ItemsView)):
        return any(_holds(is_one, y) for y in x)
    return is_one(x)


def is_plain(x: object) -> bool:
    """Returns True for what a shadow copies: numbers, strings, 0-d tensors, and lists, tuples or dicts of them."""
    if type(x) in NUMBERS:
        return True
    if isinstance(x, torch.Tensor):
        return x.dim() == 0
    if isinstance(x, (list, tuple)):
        return NUMBERS.issuperset(map(type, x)) or all(map(is_plain, x))
    if isinstance(x, dict):
        return all(is_plain(k) and is_plain(v) for k, v in x.items())
    return isinstance(x, (int, float, str))


def is_carried(x: object) -> bool:
    """Returns True for what a recording carries from step to step: what is plain, and tensors."""
    return isinstance(x, torch.Tensor) or is_plain(x)


def uncarried(names: Mapping[Any, Any]) -> dict[Any, Any]:
    """The entries of `names` that a recording does not carry."""
    return {k: v for k, v in names.items() if type(v) not in NUMBERS and not is_carried(v)}


def detached(x: Any) -> Any:
    """A copy of numbers, 0-d tensors, or lists of them, that later recordings do not change."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone() if x.dim() == 0 and x.device.type != "meta" else x
    return copy.deepcopy(x) if isinstance(x, (list, dict)) and is_plain(x) else x


def all_detached(names: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same of everything in `names`."""
    return {k: v if type(v) in NUMBERS else detached(v) for k, v in names.items()}


def scalars_in(names: Mapping[Any, Any]) -> dict[Any, Any]:
    """Copies of what a recording carries as numbers: all but objects, and tensors of the tensor plane."""
    return all_detached({k: v for k, v in names.items() if is_carried(v) and not is_meta(v)})


def differing(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """The plain entries of `after` that are others in `before`, or not there."""
    plain = {k: v for k, v in after.items() if is_plain(v)}
    return {k: v for k, v in plain.items() if k not in before or not same_number(before[k], v)}


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
