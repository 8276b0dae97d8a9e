"""Measures how much of a group's steps reaches parameters that are kept in a low word, where no learning rate tells it.

Steps of SGD, momentum and ASGD have the size of the gradient. The samples of validation have what a step should add to
each element (in fp32) and what it adds to what is stored, so nothing is computed twice and no other step waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from collage_neuron.states import strategy_checks, word_encoding
from collage_neuron.states.bookkeeping import bookkeeping

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job
    from collage_neuron.validation.validate import Found

LOOKS, STEPS = 3, 16
"""Validated steps that are needed, and their least number: momentum of 0.9 has grown to four fifths by then."""
ENOUGH = 0.75
"""The smallest share of the steps that is not warned of."""


@dataclass
class Arrived:
    """Sums over the validated steps of a group, since its learning rate rose."""

    rate: float
    last: int = 0
    looks: int = 0
    wanted: float = 0.0
    """Of the squared norm of the steps in fp32, estimated from samples."""
    arrived: float = 0.0
    """Of their inner product with what was added: equal to `wanted` if every step arrives (EDQ)."""


def look(found: Found, job: Job) -> None:
    """Adds a sample of `job` to the sums of its group, and warns, once, if too little arrives."""
    optimizer = found.optimizer
    index = next(i for i, group in enumerate(optimizer.param_groups) if group is job.group)
    fmt = job.update.formats["param"]
    group = strategy_checks.Group(optimizer, index, job.settings, type(optimizer))
    # Samples of drawn values, on lazy devices, have gradients of no size.
    if found.taken.is_drawn or not group.is_measured(fmt, job.recording.captured.graph):
        return
    rate, largest = strategy_checks.rate_of(job.group, ("lr",)), strategy_checks.rate_of(job.group)
    sums = bookkeeping(optimizer).arrived
    # Warming up is no reason to warn: sums begin anew where the rate rose, and wait while it is below half the largest.
    if rate < largest / 2:
        return
    if index not in sums or rate > sums[index].rate:
        sums[index] = Arrived(rate)
    _add(sums[index], found)
    own = sums[index]
    if own.looks >= LOOKS and found.steps >= STEPS and own.arrived < ENOUGH * own.wanted:
        group.warn_measured(fmt, own.arrived / own.wanted)


def _add(own: Arrived, found: Found) -> None:
    wanted, added = _steps(found)
    finite = wanted.isfinite() & added.isfinite()
    wanted, added = wanted[finite].double(), added[finite].double()
    if not wanted.any():  # no gradient, or a learning rate of 0
        return
    weight = found.param.numel() / finite.numel()
    own.wanted += weight * float(wanted.square().sum())
    own.arrived += weight * float((wanted * added).sum())
    own.looks += own.last != found.steps
    own.last = found.steps


def _steps(found: Found) -> tuple[Tensor, Tensor]:
    """What a step adds to each element of the sample: in fp32, and as it is stored."""
    fmt = found.taken.formats["param"]
    old, new = (
        word_encoding.decode(fmt, c, "param").float() for c in (found.before["param"], found.taken.components("param"))
    )
    return found.wanted.values["param"] - old, new - old
