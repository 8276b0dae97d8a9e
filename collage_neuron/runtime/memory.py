"""Bytes that a planned update keeps: its parameters, states and gradients, under its formats and under others."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.states import small, words
from collage_neuron.states.state_keys import names_in

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job


def elements_of(jobs: Iterable[Job]) -> int:
    """The number of elements of the parameters of the jobs."""
    return sum(p.numel() for job in jobs for p in job.params)


def sizes_of(optimizer: Optimizer, job: Job) -> dict[str, int]:
    """Bytes of the parameters, the states and the gradients of a job, by name.

    Existing tensors count with their size, later ones with the size that their format has.
    """
    formats = job.update.formats
    sizes = {
        name: sum(_size(p, optimizer.state.get(p, {}), name, fmt) for p in job.params) for name, fmt in formats.items()
    }
    sizes |= small.bytes_of(job.recording.captured, job.params)
    return sizes | _others(optimizer, job, sizes) | {"grad": _gradients(job)}


def _others(optimizer: Optimizer, job: Job, counted: Container[str]) -> dict[str, int]:
    """Bytes of existing states that the update neither reads nor writes, by name; no counts."""
    found: dict[str, int] = {}
    for p in job.params:
        state = optimizer.state.get(p, {})
        names = names_in(state)
        for key, value in state.items():
            own = key if key in names.own else next((n for n in names.own if str(key).startswith(f"{n}_")), key)
            if own not in counted and key not in names.words and isinstance(value, torch.Tensor) and value.dim():
                found[str(own)] = found.get(str(own), 0) + value.nbytes
    return found


def bytes_with_masters(job: Job) -> int:
    """Bytes that the parameters of a job would need with fp32 masters and fp32 states, their gradients included."""
    captured = job.recording.captured
    formats = formats_for("fp32", captured.states, NO_ROLES, job.params[0].dtype)
    numbers = sum(small.bytes_of(captured, job.params).values())
    return _gradients(job) + numbers + sum(_size(p, {}, name, fmt) for p in job.params for name, fmt in formats.items())


def _gradients(job: Job) -> int:
    return sum((p if p.grad is None else p.grad).nbytes for p in job.params)


def _size(p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format) -> int:
    kept = [p if key == "param" else state.get(key) for key in fmt.keys(name)]
    return sum(
        math.prod(words.shape_of(c, p.shape)) * c.bytes if t is None or c.block else t.nbytes  # of a shard too
        for c, t in zip(fmt.components, kept, strict=True)
    )


def shown(size: float) -> str:
    """Bytes in decimal units, `1.49 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} bytes"
