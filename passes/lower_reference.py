"""Lower to the reference backend: the explicit-rounding graph run by PyTorch, operation by operation.

Every `round_to` is a real cast, so nothing can be fused away: this backend is the oracle of the others, on any
device. It is itself checked against exact rationals and float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collage_neuron.passes.expand import Update


class ReferenceUpdate:
    """Callable form of an update on the reference backend."""

    def __init__(self, update: Update) -> None:
        self._forward = update.graph.forward

    def __call__(self, components: Sequence[torch.Tensor], scalars: torch.Tensor) -> Sequence[torch.Tensor]:
        """New components from the old ones (each parameter-shaped) and the fp32 scalar vector."""
        results: Sequence[torch.Tensor] = self._forward(*components, *scalars.unbind())
        # An fp32 component that only moves (a state becomes another, or keeps the old parameter) comes back as itself:
        # the caller writes one result after the other, and must not find it overwritten.
        moved = {id(c) for c in components}
        return [r.clone() if id(r) in moved else r for r in results]
