"""Gradients with NaN or Inf in them: let through, as torch does, or a step that changes nothing and is counted.

Whether a step is skipped is decided on the device and never read by the host, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.sharding import gradient

CHOICES = ("pass", "skip")
"""`pass`: NaN and Inf go where the optimizer's own arithmetic takes them. `skip`: see `skipped_steps`."""

_skipped: WeakKeyDictionary[Optimizer, torch.Tensor] = WeakKeyDictionary()


def check_choice(choice: str) -> None:
    """Raises ValueError for an unknown one."""
    if choice not in CHOICES:
        raise ValueError(f"unknown nonfinite {choice!r}; choose one of {', '.join(CHOICES)}")


def all_finite(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether no gradient has NaN or Inf in it: a 0-d mask on the device of the first parameter."""
    device = params[0].device
    return torch.stack([torch.isfinite(gradient(p)).all().to(device) for p in params if p.grad is not None]).all()


def count(optimizer: Optimizer, finite: torch.Tensor) -> None:
    """Counts a step, on the device, if it is skipped."""
    before = _skipped.get(optimizer)
    now = (~finite).to(torch.int32)
    _skipped[optimizer] = now if before is None else before.to(now.device) + now


def skipped_steps(optimizer: Optimizer) -> int:
    """How many steps `optimizer` skipped since it was made, because of NaN or Inf in a gradient.

    With ``nonfinite="skip"`` one such element in any of the gradients makes the step leave every parameter and every
    state tensor as it is, to the last bit. The numbers on the host go on (`step`, and what is computed from it, as bias
    corrections), since the host does not wait to know. Under sharding each process sees its own gradients: clip them
    first (`clip_grad_norm_` makes all of them NaN where the norm is), and all processes skip together.
    """
    found = _skipped.get(optimizer)
    return 0 if found is None else int(found.item())
