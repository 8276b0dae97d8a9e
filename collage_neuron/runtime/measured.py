"""What a step measures of one parameter's update, for a monitor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Measured:
    """The measurements of one parameter's update."""

    param: torch.nn.Parameter
    names: tuple[tuple[str, ...], tuple[str, ...]]
    """Of the sums and of the counts (`passes/rewrite/instrument.py`)."""
    sums: torch.Tensor
    counts: torch.Tensor
    """Vectors on the parameter's device, not fetched yet."""
    number: Any
    """The optimizer's own count after the step, a number on the host; None if it has none."""
