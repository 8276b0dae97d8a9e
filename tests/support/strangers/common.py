"""What several cases share: gradients of few digits, and a heavy ball."""

from __future__ import annotations

from typing import Any

import torch
from hostile import Base, World
from torch import Tensor


def eighths(world: World, number: int, step: int) -> Tensor:
    """A gradient in multiples of 1/8, so that sums of some are exact in bf16."""
    return (world.gradient(number, step).float() * 8).round() / 8


def momentum(p: Any, g: Any, state: Any, group: Any) -> None:
    """Heavy ball, for cases that are about something else."""
    if "m" not in state:
        state["m"] = torch.zeros_like(p)
    state["m"].mul_(0.9).add_(g)
    p.add_(state["m"], alpha=-group["lr"] * 0.1)


class Ball(Base):
    """The same as an optimizer."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        momentum(p, g, state, group)
