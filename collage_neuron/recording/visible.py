"""A state as the optimizer's own code knows it, which is what recordings show it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from collage_neuron.passes.capture.planes import check_floating
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.states.store import is_component, is_host_scalar


def visible(state: Mapping[str, Any], p: torch.Tensor) -> dict[str, Any]:
    """The state as the optimizer's own code knows it: without our components, tensors without their values."""
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    return {k: v if is_host_scalar(v, p) else shaped(k, v, p) for k, v in own.items()}


def shaped(name: str, value: Any, p: torch.Tensor) -> ParamShaped:
    """What stands for a state of the shape of `p` in a recording."""
    if isinstance(value, torch.Tensor):
        check_floating(name, value.dtype)
    return ParamShaped(p)
