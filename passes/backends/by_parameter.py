"""The base of backends that update one parameter at a time: run the update, write the results, then the next one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.ir.update import Update


class Lowered(Protocol):
    """An update that is ready to run on one parameter."""

    def __call__(self, components: Sequence[Tensor], scalars: Tensor) -> Sequence[Tensor]:
        """Returns new components from the old ones and the scalar vector, then sums and counts if it measures."""


class ByParameter(Backend):
    """Runs a step one parameter after the other, so that the new components of only one need memory at a time."""

    @cached_property
    def _lowered(self) -> dict[Update, Lowered]:
        return {}  # not in a constructor, which a subclass may forget to call

    @abstractmethod
    def lower(self, update: Update) -> Lowered:
        """Returns the callable form of `update`."""

    def lowered(self, update: Update) -> Lowered:
        """The same, cached."""
        if update not in self._lowered:
            self._lowered[update] = self.lower(update)
        return self._lowered[update]

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        """Runs each launch, parameter by parameter."""
        return [measure for launch in launches for measure in self.run_one(launch)]

    def run_one(self, launch: Launch) -> list[Measure]:
        """Runs one launch; its measurements, of each parameter, if the update has any."""
        call, size = self.lowered(launch.update), len(launch.update.outputs)
        rows = launch.vector.to(launch.reads[0][0].device).expand(len(launch.reads), -1)
        measured = []
        for reads, writes, scalars in zip(launch.reads, launch.writes, rows, strict=True):
            results = call(masked(launch, reads), scalars)
            write(launch, writes, results[:size])
            measured += [Measure(*results[size:])] if launch.update.sums else []
        return measured


def masked(launch: Launch, reads: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors that an update reads for a parameter; the gradient is zero if the launch is skipped."""
    if launch.finite is None:
        return reads
    named = zip(launch.update.inputs, reads, strict=True)
    return [torch.where(launch.finite.to(x.device), x, 0.0) if key == "grad" else x for key, x in named]


def write(launch: Launch, writes: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes the new components of a parameter, unless the launch is skipped or they are there already.

    It uses `copy_` and never replaces the data: on XLA, only `copy_` lets the result reuse the old tensor's buffer.
    `torch._foreach_copy_` saves nothing there: it calls `copy_` for each tensor too (740 tensors: 3.5 ms either way).
    """
    for old, new in zip(writes, results, strict=True):
        if new is old:  # a kernel has stored it
            continue
        old.copy_(new if launch.finite is None else torch.where(launch.finite.to(old.device), new, old))
