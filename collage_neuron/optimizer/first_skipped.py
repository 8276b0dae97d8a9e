"""The first step of a parameter, where it is skipped because a gradient is not finite: it leaves no state behind.

The host does not wait for the decision to skip: it lets the step advance its numbers, and the device writes nothing. A
first step also creates states, often with values that only it gives them (schedule-free's `z` is the parameter, SGD's
momentum the gradient), and what would be left of it is zeros, which every later step takes for those values. So the
host asks for the decision where a step creates something, and leaves such a step out: the next one is the first again.
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
    """The jobs of a step but those that would create states and are skipped; waits for `finite` if there are such."""
    if finite is None:
        return jobs
    first = [job for job in jobs if job.settings.nonfinite == "skip" and _creates(optimizer, job)]
    if not first or bool(finite):
        return jobs
    return [job for job in jobs if not any(job is other for other in first)]


def _creates(optimizer: Optimizer, job: Planned) -> bool:
    """Returns True if a parameter lacks a state or a number that the update writes."""
    stored = {fmt.keys(name)[0] for name, fmt in job.update.formats.items() if name != "param"}
    names = stored | set(job.recording.captured.small) | job.recording.scalars.keys()
    return any(not names <= optimizer.state[p].keys() for p in job.params) if names else False
