"""Runs launches on the CPU for a device that has no float64 or int64 of its own, and warns that it does.

The reference form takes roots, sums and random bits in these types. A device that narrows them without a word
(`torch_neuron.narrows`) would compute other words; so all components are copied to the host, and results back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from collage_neuron.errors import ComputedOnHost, warn_user
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure


def run(backend: Backend, launches: Sequence[Launch]) -> Sequence[Measure]:
    """What `backend` makes of the launches on the CPU, written to their own tensors."""
    _tell(launches[0].reads[0][0].device)
    here = [_moved(launch) for launch in launches]
    measures = backend.run(here) or ()
    for launch, own in zip(launches, here, strict=True):
        for written, computed in zip(launch.writes, own.writes, strict=True):
            for old, new in zip(written, computed, strict=True):
                old.copy_(new)
        for states, found in zip(launch.small, own.small, strict=True):
            for name, state in states.items():
                state.copy_(found[name])
    return measures


def _moved(launch: Launch) -> Launch:
    """The launch with all its tensors on the CPU; what is read and written is one tensor there too."""
    copies: dict[int, Tensor] = {}

    def here(x: Tensor) -> Tensor:
        return copies.setdefault(id(x), x.detach().cpu())

    reads, writes = ([[here(x) for x in row] for row in rows] for rows in (launch.reads, launch.writes))
    small = [{name: here(state) for name, state in states.items()} for states in launch.small]
    finite = None if launch.finite is None else launch.finite.cpu()
    return launch._replace(reads=reads, writes=writes, small=small, finite=finite, kept=None)


@cache
def _tell(device: torch.device) -> None:
    warn_user(
        f"what runs on the reference backend is computed on the CPU, and copied there and back: {device} takes float64 "
        "for fp32 and int64 for int32, and would compute other words. It is slow: prefer what backend='auto' has a "
        "kernel for (docs/trn2.md)",
        ComputedOnHost,
    )
