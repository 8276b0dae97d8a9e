"""Which parts of a step are left out because a gradient is not finite, as if `step()` had not been called for them.

Where the decision to skip is on the host, all that skip are: no number advances. A device decides later. The host does
not wait for it, lets the step advance its numbers, and the device writes nothing. But a step that creates states, often
with values that only it gives them (schedule-free's `z` is the parameter, SGD's momentum the gradient), would leave
zeros, which every later step takes for those values. So there the host asks, and the next step is the first again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch.optim import Optimizer

from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.ir.update import Update
from collage_neuron.settings import Settings


class Planned(Protocol):
    """What is asked of a job (`runtime/plan.py`)."""

    @property
    def params(self) -> Sequence[torch.Tensor]:
        """Its parameters."""

    @property
    def recording(self) -> Recording:
        """Their step."""

    @property
    def update(self) -> Update:
        """The same, rewritten."""

    @property
    def settings(self) -> Settings:
        """Those of its group."""


Job = TypeVar("Job", bound=Planned)


def taken(optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None) -> list[Job]:
    """The jobs of a step but those that are left out; on a device, waits for `finite` if one would create states."""
    skipping = [job for job in jobs if finite is not None and job.settings.nonfinite == "skip"]
    if finite is None or not skipping:
        return jobs
    known = skipping if finite.is_cpu else [job for job in skipping if _creates(optimizer, job)]
    if not known or bool(finite):
        return jobs
    return [job for job in jobs if not any(job is other for other in known)]


def _creates(optimizer: Optimizer, job: Planned) -> bool:
    """Returns True if a parameter lacks a state or a number that the update writes."""
    stored = {fmt.keys(name)[0] for name, fmt in job.update.formats.items() if name != "param"}
    names = stored | set(job.recording.captured.small) | job.recording.scalars.keys()
    return any(not names <= optimizer.state[p].keys() for p in job.params) if names else False
