"""Gradients with NaN or Inf in them: let through, as torch does, or a step that changes nothing and is counted.

Whether a step is skipped is decided on the device and never read by the host, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from collage_neuron.settings import SKIPPED
from collage_neuron.states.sharding import gradient


def all_finite(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whether no gradient has NaN or Inf in it: a 0-d mask on the device of the first parameter, if there is one."""
    device = params[0].device if params else None
    found = [torch.isfinite(gradient(p)).all().to(device) for p in params if p.grad is not None]
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)


def count(optimizer: Optimizer, finite: torch.Tensor) -> None:
    """Counts a step, on the device, if it is skipped. All groups that skip have the one count of the optimizer."""
    # A number becomes a tensor first: as a constant it would be another program on XLA, after each checkpoint.
    before = torch.as_tensor(_count(optimizer), dtype=torch.int32).to(finite.device)
    _set(optimizer, before + (~finite).to(torch.int32))


def read_counts(optimizer: Optimizer) -> None:
    """Makes the count a number in every group that skips, for a checkpoint. Waits for the device."""
    _set(optimizer, int(_count(optimizer)))


def _count(optimizer: Optimizer) -> torch.Tensor | int:
    counts = (group[SKIPPED] for group in optimizer.param_groups if SKIPPED in group)
    return next(counts, 0)


def _set(optimizer: Optimizer, count: torch.Tensor | int) -> None:
    for group in optimizer.param_groups:
        if SKIPPED in group or group.get("collage_nonfinite") == "skip":
            group[SKIPPED] = count


def skipped_steps(optimizer: Optimizer) -> int:
    """How many steps of this run `optimizer` skipped, because of NaN or Inf in a gradient.

    The count is in `param_groups` (`collage_skipped`): copies, pickles and checkpoints carry it. A checkpoint without
    it starts at 0.

    With ``nonfinite="skip"`` one such element in any of the gradients makes the step leave every parameter and every
    state tensor as it is, to the last bit. The numbers on the host go on (`step`, and what is computed from it, as bias
    corrections), since the host does not wait to know. Processes that share parameters skip together.
    """
    return int(_count(optimizer))
