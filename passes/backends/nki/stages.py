"""The stages before the last one on Trainium: kernels that add up, and torch's operations on a number a parameter.

Given (LAMB)::

    stage 0, reduction:    param, grad -> reduced0, reduced1
    stage 1, numbers:      reduced0, reduced1 -> number0
    stage 2, elementwise:  param, grad, number0 -> param

Result: one kernel for stage 0, of all parameters of a launch, which leaves sums of each chunk (`chunk_sums.py`); these
are put together, and stage 1 computed, by operations on small tensors of the device, in fp32; the kernel of stage 2
reads its numbers with those of the step. The host waits for none of it.

Trn1 takes one kernel in a graph (`calls.py`), so on XLA the graph ends after each kernel of a reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.eft import sqrt
from collage_neuron.numerics.fp32_pairs import square_root
from collage_neuron.passes.backends.nki.calls import call, parts_of
from collage_neuron.passes.backends.nki.chunk_totals import nothing_of, sums_of
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.target import Machine, machine_of
from collage_neuron.passes.backends.protocol import Found, Launch
from collage_neuron.passes.backends.staged import find_by, kinds_of
from collage_neuron.passes.ir.stage import Stage


def found_of(launch: Launch) -> Found | None:
    """What the stages before the last one find for the parameters of a launch; None if there are none."""
    if not launch.update.is_staged or not launch.reads:
        return None
    machine = machine_of(launch.reads[0][0].device)
    return find_by(launch, lambda part, rows: _reduced(part, rows, machine), _computed)


def _reduced(launch: Launch, rows: Tensor, machine: Machine) -> list[Tensor]:
    """The numbers of a reduction, for all parameters of its launch."""
    kinds = kinds_of(launch.update.stages[0])
    parts = list(parts_of(0, launch, machine))
    present = [part for part in parts if part.tensors[0].numel()]
    groups: dict[Any, list[tuple[int, Tensor]]] = {}
    for part, (totals,) in zip(present, call([launch], present, machine, [rows]) if present else (), strict=True):
        groups.setdefault((part.kernel, tuple(part.shape)), []).append((part.parameter, totals))
    _end_graph(rows.device, machine)
    empty = torch.stack([torch.tensor(nothing_of(kind)) for kind in kinds]).to(rows.device)
    found = dict.fromkeys((part.parameter for part in parts), empty)
    for (kernel, shape), of_one in groups.items():
        numbers = sums_of(kernel.plan.program, kinds, torch.stack([t for _, t in of_one]), torch.Size(shape).numel())
        found |= zip((place for place, _ in of_one), numbers.unbind(), strict=True)
    return list(torch.stack([found[k] for k in range(len(parts))]).unbind(1))


def _end_graph(device: torch.device, machine: Machine) -> None:
    """Ends a graph of XLA, so that the next kernel is in another one; waits for nothing."""
    if device.type == "xla" and TARGETS[machine.target].one_call:
        import torch_xla  # an extra: imported only where parameters are on an XLA device

        torch_xla.sync()


class _Numbers(fx.Interpreter):
    """Runs a stage of numbers in fp32: a square root is that of `fp32_pairs`, since there is no fp64."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation."""
        return super().call_function(square_root if target is sqrt else target, args, kwargs)


def _computed(stage: Stage, rows: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = _Numbers(stage.graph).run(*rows.unbind(1))
    return found
