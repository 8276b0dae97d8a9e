"""What is measured of fp8 matmuls, for users: `explain(model)`, and the numbers that a monitor records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collage_neuron.matmuls.advice import advice
from collage_neuron.matmuls.capture import Backend, Captured
from collage_neuron.matmuls.install import forward_of
from collage_neuron.matmuls.scales import Measurement, Scales


def describe(model: torch.nn.Module) -> str:
    """The description as text. Waits for the device.

    Raises:
        ValueError: the model was not compiled with ``matmul="fp8"``.
    """
    forward = forward_of(model)
    if forward is None:
        raise ValueError(
            f"this {type(model).__name__} was not compiled with matmul='fp8', which is what explain(model) describes; "
            "explain(optimizer) describes updates"
        )
    return "\n".join(_lines(forward.backend.graphs)) or "matmul='fp8': the model is captured at its first forward"


def _lines(graphs: list[Captured]) -> Iterator[str]:
    for graph in graphs:
        plan, scales = graph.plan, graph.backend.scales
        what = "forward and backward" if plan.tangents else "forward"
        yield f"graph {graph.number} ({what}): {len(plan.products)} matmuls of linear layers in fp8"
        yield f"  as they are: {', '.join(plan.kept) or 'none'}"
        for name, why in plan.reductions.items():
            yield f"  {name} takes its largest magnitude in every step: {why}"
        exponents, seen = scales.exponents(), scales.seen()
        for name, fmt in plan.formats.items():
            if name in graph.unsteady:
                continue
            key = graph.key(name)
            yield f"  {key}: {fmt}, scale 2**{-exponents[key]}{_measured(seen.get(key))}"
        keys = {graph.key(name): None for name in plan.formats}
        limited = set(scales.beyond())
        for key in keys:
            found = seen.get(key)
            if found and (said := advice(key, found.binades, found.saturated, found.vanished, key in limited)):
                yield f"  {said}"
        yield from (f"  {line}" for line in _unknown(graph, keys))


def _unknown(graph: Captured, keys: Iterable[str]) -> Iterator[str]:
    """What no call has found a size of yet."""
    if any(half.assumed and half.calls for half in graph.halves):
        yield (
            "warning: the gradients of the outputs were zero or not finite in every call, and are taken to be about 1 "
            "until they are not"
        )
    unsettled = set(graph.backend.scales.unsettled())
    for key in keys:
        if key in unsettled:
            yield f"warning: {key} was zero or not finite whenever it was measured, so the next call measures it too"


def _measured(seen: Measurement | None) -> str:
    if seen is None:
        return ""
    drift = "" if not 0 < seen.drift < math.inf else f"off by 2**{round(seen.binades)}, "
    return f" (when measured last: {drift}{seen.saturated:.1%} saturated, {seen.vanished:.1%} became 0)"


Operands = dict[str, dict[str, Tensor]]


class NewMeasurements:
    """Hands out each measurement of some models once, still on the device: what a monitor records."""

    def __init__(self) -> None:
        self._handed_out: dict[int, list[int]] = {}

    def new(self, models: Iterable[torch.nn.Module]) -> Operands:
        """The numbers of the last measurement by operand; empty if there was none since the last call."""
        forwards = (forward_of(model) for model in models)
        return dict(
            row for f in forwards if f is not None and self._is_new(f.backend) for row in _rows(f.backend.scales)
        )

    def _is_new(self, backend: Backend) -> bool:
        calls = [half.recalibration.history[-1] for graph in backend.graphs for half in graph.halves]
        # By the calls that have measured, which the host knows: a look at the numbers would wait for the device.
        before, self._handed_out[id(backend)] = self._handed_out.get(id(backend), []), calls
        return calls != before


def _rows(scales: Scales) -> Iterator[tuple[str, dict[str, Tensor]]]:
    rows = scales.last.clone()
    drift = rows[:, 0].log2()  # of zeros -inf, which a log of numbers has as None
    for name in sorted(scales.measured):
        at = scales.places[name]
        yield name, {"drift": drift[at], "saturated": rows[at, 1], "vanished": rows[at, 2]}
