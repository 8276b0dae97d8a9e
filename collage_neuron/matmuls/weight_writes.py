"""Notices that weights were written by other code than the steps of an optimizer: their scales may not fit any more."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import torch

from collage_neuron import torch_privates

FIRST = 4
"""Calls that tell how often a step writes."""
MOST = 16
"""The different numbers of writes from which on one more says nothing: each step writes some of the weights."""


class WeightWrites:
    """The writes to the weights of one graph.

    It looks at how often tensors were written, not at values; writes to `p.data` are not counted. A run writes each
    parameter as often in one step as in the next one, or not at all (accumulation). A number of writes that was not met
    before is taken for other code's, except in the first calls, most of which measure anyway.

    A graph without gradients counts every write, also those of steps.

    Args:
        every: True if writes of steps count too.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._usual = {0}
        self._calls = 0
        self._there: list[ref[torch.Tensor]] = []
        self._writes: int | None = None

    def changed(self, weights: Sequence[torch.Tensor]) -> bool:
        """Returns True if weights were written in an unusual way since the last call, or are other tensors."""
        self._calls += 1
        writes = sum(torch_privates.version(p) for p in weights if not p.is_inference())
        there = [r() for r in self._there]
        others = len(weights) != len(there) or any(p is not q for p, q in zip(weights, there, strict=True))
        if others:
            self._there = [ref(p) for p in weights]
        before, self._writes = self._writes, writes
        if before is None or others:
            return before is not None
        return writes != before if self._every else self._is_new(writes - before)

    def _is_new(self, writes: int) -> bool:
        is_new = writes not in self._usual and self._calls > FIRST and len(self._usual) < MOST
        self._usual.add(writes)
        return is_new
