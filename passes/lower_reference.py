"""Lower to the reference backend: the explicit-rounding graph run by PyTorch, operation by operation.

Every `round_to` is a real cast, so nothing can be fused away: this backend is the oracle of the others, on any
device. It is itself checked against exact rationals and float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collage_neuron.passes.expand import Update

CHUNK = 1 << 16
"""Elements the CPU updates at a time, so that what an operation writes is still in the cache when the next reads it."""


class ReferenceUpdate:
    """Callable form of an update on the reference backend."""

    def __init__(self, update: Update) -> None:
        self._forward = update.graph.forward
        self._elementwise, self._sums = len(update.outputs + update.wanted), len(update.sums)

    def __call__(self, components: Sequence[torch.Tensor], scalars: torch.Tensor) -> Sequence[torch.Tensor]:
        """New components from the old ones (each parameter-shaped) and the fp32 scalar vector.

        A measured update also returns its sums, added in float64, and its counts, in int64: a vector of each.
        """
        first = components[0]
        if first.device.type != "cpu" or first.numel() <= CHUNK:
            return self._run(components, scalars)
        pieces = zip(*(c.detach().reshape(-1).split(CHUNK) for c in components), strict=True)
        results = list(zip(*(self._run(piece, scalars) for piece in pieces), strict=True))
        size = self._elementwise
        measures = [torch.stack(parts).sum(0) for parts in results[size:]]
        return [*(torch.cat(words).view(first.shape) for words in results[:size]), *measures]

    def _run(self, components: Sequence[torch.Tensor], scalars: torch.Tensor) -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = self._forward(*components, *scalars.unbind())
        if self._sums:
            end = self._elementwise
            middle = end + self._sums
            results = [*results[:end], torch.stack([*results[end:middle]]), torch.stack([*results[middle:]])]
        # An fp32 component that only moves (a state becomes another, or keeps the old parameter) comes back as itself:
        # the caller writes one result after the other, and must not find it overwritten.
        given = {id(c) for c in components}
        return [r.clone() if id(r) in given else r for r in results]
