"""Copies of tensors on torch_xla devices that are still to be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def end(states: Iterable[Mapping[Any, Any]]) -> None:
    """Ends the graph of XLA if states are there, so that copies of tensors (`copy.deepcopy`) are none of their buffers.

    Until then, a copy is only another name of a buffer. A step that writes the copy in the same graph gives the buffer
    away, and what was copied is lost.
    """
    if any(isinstance(x, torch.Tensor) and x.device.type == "xla" for state in states for x in state.values()):
        import torch_xla  # an extra: imported only where parameters are on an XLA device

        torch_xla.sync()
