"""Which states are values that are stored in formats, and which are kept as the optimizer made them.

Every tensor that a captured step updates is a value. A step as written (`eager`) may leave anything in a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collage_neuron.states.names import names_in
from collage_neuron.states.sharding import is_sharded_like


def is_value(x: object, p: torch.Tensor) -> bool:
    """Returns True for a state that a step as written stores in a format: fp32 or bf16, in the parameter's shape.

    A single number of fp32 is kept as it is, since it may count; one of bf16 is a word. float64, float16, another
    device (a state on the host) and other placements than those of a parameter in shards were chosen by the
    optimizer's author.
    """
    if not isinstance(x, torch.Tensor) or not _is_alike(x, p) or x.device != p.device or not is_sharded_like(x, p):
        return False
    return x.numel() != 1 or x.dtype == torch.bfloat16


def values_in(state: Mapping[str, Any], p: torch.Tensor, record: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the states of `p` that are values now; captured steps, whose formats are recorded, have more."""
    names = names_in(state)
    recorded = {
        k for k in names.own if k in record and _is_of_elements(state[k], p) and state[k].dim() >= min(p.dim(), 1)
    }
    return tuple(k for k in names.own if k in names.watched or k in recorded or is_value(state[k], p))


def may_be_read(state: Mapping[str, Any], name: str, p: torch.Tensor, record: Mapping[str, str]) -> bool:
    """Returns True for a state with a value in fp32: one that is stored in words, or is a word of its shape."""
    is_recorded = name in record and _is_of_elements(state[name], p)
    return name in names_in(state).watched or is_recorded or _is_alike(state[name], p)


def _is_of_elements(x: object, p: torch.Tensor) -> bool:
    """Returns True for a word of each element of `p`, in any shape: captured steps keep states in other shapes too."""
    return isinstance(x, torch.Tensor) and x.numel() == p.numel() and _is_alike(x, x)


def _is_alike(x: object, p: torch.Tensor) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.shape == p.shape
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.layout is torch.strided
    )
