"""Support for `torch.amp.GradScaler` with a fused optimizer, which leaves two tasks to the step.

The scaler sets two attributes of the optimizer: the step must divide gradients by `grad_scale` unless it is None, and
must be skipped if `found_inf` is not zero. With any other optimizer the scaler does both itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates

_LEFT_TO_STEP = ("grad_scale", "found_inf")


@contextmanager
def put_aside(optimizer: Optimizer) -> Iterator[dict[str, torch.Tensor | None]]:
    """Removes the two attributes from an optimizer, since a step that is not fused does not know them."""
    held = vars(optimizer)
    names = _LEFT_TO_STEP if torch_privates.unscales_itself(optimizer) else ()
    taken = {name: held.pop(name) for name in names if name in held}
    try:
        yield taken
    finally:
        held.update(taken)


def prepare(optimizer: Optimizer, left: dict[str, torch.Tensor | None]) -> bool:
    """Divides gradients by their scale, in place as a fused step does; returns False if the step is to be skipped."""
    found_inf, scale = left.get("found_inf"), left.get("grad_scale")
    if found_inf is not None and found_inf.item() != 0:
        return False
    if scale is not None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.div_(scale.to(p.grad.device))
    return True
