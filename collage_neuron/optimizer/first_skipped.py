"""The first step of a parameter, where it is skipped because a gradient is not finite: it leaves no state behind.

The host does not wait for the decision to skip: it lets the step advance its numbers, and the device writes nothing. A
first step also creates states, often with values that only it gives them (schedule-free's `z` is the parameter, SGD's
momentum the gradient), and what would be left of it is zeros, which every later step takes for those values. So the
host asks for the decision where a step creates something, and leaves such a step out: the next one is the first again.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from collage_neuron.runtime.plan import Job


def taken(optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None) -> list[Job]:
    """The jobs of a step but those that would create states and are skipped; waits for `finite` if there are such."""
    if finite is None:
        return jobs
    first = [job for job in jobs if job.settings.nonfinite == "skip" and _creates(optimizer, job)]
    if not first or bool(finite):
        return jobs
    return [job for job in jobs if not any(job is other for other in first)]


def _creates(optimizer: Optimizer, job: Job) -> bool:
    """Returns True if a parameter lacks a state or a number that the update writes."""
    stored = {fmt.keys(name)[0] for name, fmt in job.update.formats.items() if name != "param"}
    names = stored | set(job.recording.captured.small) | job.recording.scalars.keys()
    return any(not names <= optimizer.state[p].keys() for p in job.params) if names else False
