"""The view of a parameter's state that recordings give to the optimizer's own code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from collage_neuron.passes.capture.planes import check_floating
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.states.names import names_in
from collage_neuron.states.store import is_host_scalar


def visible(state: Mapping[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """The state as the optimizer's own code knows it: without our further words, and with tensors without values."""
    names = names_in(state)
    own = {k: ParamShaped(p) if k in names.coded else state[k] for k in names.own}
    return {k: v if is_host_scalar(v, p) else shaped(k, v, p) for k, v in own.items()}


def shaped(name: str, value: Any, p: torch.Tensor) -> ParamShaped:
    """The placeholder for a state with the shape of `p` in a recording."""
    if isinstance(value, torch.Tensor):
        check_floating(name, value.dtype)
    return ParamShaped(p)


def told(states: Mapping[Any, Mapping[str, Any]], params: Iterable[torch.Tensor]) -> list[tuple[Any, ...]]:
    """A key of the properties of a state on which a recording depends."""
    found = []
    for p in params:
        state = states.get(p, {})
        names = names_in(state)
        found.append(tuple((k, None if k in names.coded else _told(k, state[k], p)) for k in names.own))
    return found


def _told(name: str, value: Any, p: torch.Tensor) -> Any:
    """None for tensors of the parameter's shape, whose values do not matter."""
    if isinstance(value, ParamShaped):
        return None
    if not isinstance(value, torch.Tensor):
        return number(value)
    if value.dim() == 0 and (p.dim() != 0 or is_host_scalar(value, p)):
        return number(value)
    if not value.dtype.is_floating_point:
        check_floating(name, value.dtype)
    return None


def number(value: Any) -> Any:
    """A key of a number, or of any other value that is not a tensor of the parameter's shape."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.dtype, value.item()  # torch loads a number of a bf16 parameter in bf16, and keeps that
    return None if isinstance(value, ParamShaped) else repr(value)
