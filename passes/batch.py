"""A batch: what a step hands to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from collage_neuron.passes.expand import Update


class Batch(NamedTuple):
    """Parameters that one update stands for, with the same numbers."""

    update: Update
    vector: Tensor
    """The update's scalar vector, 1-D fp32 on the CPU."""
    components: Sequence[Sequence[Tensor]]
    """For each parameter its components in the order of `update.inputs`, all on one device."""
