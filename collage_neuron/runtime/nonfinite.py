"""Gradients with NaN or Inf: propagated as in torch, or a skipped step, which changes nothing and is counted.

The decision to skip is made where the gradients are. If that is the host, all that skip is left out, as if `step()` had
not been called for it: no number advances. A device decides later. The host does not wait for it, lets the step advance
its numbers, and the device writes nothing. But a step that creates states, often with values that only it gives them
(schedule-free's `z` is the parameter, SGD's momentum the gradient), would leave zeros, which every later step takes for
those values. So there the host asks, and the next step is the first again. It asks too where the code of a traced step
has to know a value. Processes that share parameters skip together (`process_agreement`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from collage_neuron.runtime.process_agreement import agreed_mask
from collage_neuron.settings import SKIPPED, Settings
from collage_neuron.states.sharding import gradient

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job


def decision(optimizer: Optimizer) -> torch.Tensor | None:
    """A device mask: true if all gradients of groups with `nonfinite="skip"` are finite. None without such groups.

    Processes that share parameters share the mask. Each takes part, whether or not it has gradients in this step.
    """
    skipping = [group for group in optimizer.param_groups if Settings.of(group).nonfinite == "skip"]
    if not skipping:
        return None
    params = [p for group in skipping for p in group["params"]]
    finite = agreed_mask(optimizer, params, all_finite(params))
    count(optimizer, finite)
    return finite


def all_finite(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 0-d mask, on the device of the first parameter (if any): true if all gradients are finite."""
    device = params[0].device if params else None
    grads = [gradient(p) for p in params if p.grad is not None]
    on_host = [g for g in grads if g.is_cpu and g.numel() and not g.is_sparse]
    found = [torch.isfinite(g).all().to(device) for g in grads if not g.is_cpu or g.is_sparse]
    found += [_are_finite_between(on_host).to(device)] if on_host else []
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)


def _are_finite_between(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # NaN if there is one, in one pass; `isfinite` writes a mask, and takes 25 times as long on bf16.
    ends = [end.double() for t in tensors for end in torch.aminmax(t)]
    return torch.stack(ends).isfinite().all()


def count(optimizer: Optimizer, finite: torch.Tensor) -> None:
    """Counts a skipped step, on the device. All groups with `nonfinite="skip"` share one count."""
    # A number becomes a tensor first: as a constant it would give XLA another program after each checkpoint.
    before = torch.as_tensor(_count(optimizer), dtype=torch.int32).to(finite.device)
    _set(optimizer, before + (~finite).to(torch.int32))


def read_counts(optimizer: Optimizer) -> None:
    """Replaces the count by a number in every group that may skip, for a checkpoint. Waits for the device."""
    _set(optimizer, int(_count(optimizer)))


def _count(optimizer: Optimizer) -> torch.Tensor | int:
    counts = (group[SKIPPED] for group in optimizer.param_groups if SKIPPED in group)
    return next(counts, 0)


def _set(optimizer: Optimizer, count: torch.Tensor | int) -> None:
    for group in optimizer.param_groups:
        if SKIPPED in group or group.get("collage_nonfinite") == "skip":  # one that has skipped keeps its count
            group[SKIPPED] = count


def skipped_steps(optimizer: Optimizer) -> int:
    """Number of steps of this run that `optimizer` skipped because of NaN or Inf in a gradient.

    The count is in `param_groups` (`collage_skipped`): copies, pickles and checkpoints carry it. After loading a
    checkpoint without it the count starts at 0.

    With ``nonfinite="skip"``, if any gradient has a NaN or Inf, the step changes no bit of any parameter or state
    tensor. With parameters on the CPU, it is as if `step()` had not been called. On an XLA device, numbers on the host
    advance (`step`, and bias corrections computed from it), since the host does not wait for the decision; but a step
    that would create states (the first of a parameter) is left out, and leaves nothing behind. Processes that share
    parameters skip together.
    """
    return int(_count(optimizer))


# --- what the host leaves out -----------------------------------------------------------------------------------------


def not_skipped(optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor) -> list[Job]:
    """The jobs of a step but those that are left out; on a device, waits for `finite` if one would create states."""
    skipping = [job for job in jobs if job.settings.nonfinite == "skip" and (finite.is_cpu or _creates(optimizer, job))]
    if not skipping or bool(finite):
        return jobs
    return [job for job in jobs if not any(job is other for other in skipping)]


def _creates(optimizer: Optimizer, job: Job) -> bool:
    """Returns True if a parameter lacks a state or a number that the update writes."""
    stored = {fmt.keys(name)[0] for name, fmt in job.update.formats.items() if name != "param"}
    names = stored | set(job.recording.captured.small) | job.recording.scalars.keys()
    return any(not names <= optimizer.state[p].keys() for p in job.params) if names else False
