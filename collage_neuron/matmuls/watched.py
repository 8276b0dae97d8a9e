"""What a monitor records of the operands of fp8 matmuls: drift, saturated and vanished parts, still on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from collage_neuron.matmuls.capture import Backend
from collage_neuron.matmuls.install import forward_of
from collage_neuron.matmuls.scales import Scales

Operands = dict[str, dict[str, Tensor]]


class Watch:
    """Hands out each measurement of some models once."""

    def __init__(self) -> None:
        self._seen: dict[int, list[int]] = {}

    def new(self, models: Iterable[torch.nn.Module]) -> Operands:
        """By operand the numbers of the last measurement; empty if there was none since the last call."""
        forwards = (forward_of(model) for model in models)
        return dict(
            row for f in forwards if f is not None and self._is_new(f.backend) for row in _rows(f.backend.scales)
        )

    def _is_new(self, backend: Backend) -> bool:
        calls = [half.pace.history[-1] for graph in backend.graphs for half in graph.halves]
        before, self._seen[id(backend)] = self._seen.get(id(backend), []), calls
        return calls != before


def _rows(scales: Scales) -> Iterator[tuple[str, dict[str, Tensor]]]:
    rows = scales.last.clone()
    drift = rows[:, 0].log2()  # of zeros -inf, which a log of numbers has as None
    for name in sorted(scales.measured):
        at = scales.places[name]
        yield name, {"drift": drift[at], "saturated": rows[at, 1], "vanished": rows[at, 2]}
