"""When operands are measured: at calls 1, 2, 4, 8, ... and every `rescale`th, and sooner while they drift fast."""

from __future__ import annotations

from torch import Tensor

BINADES = 2.0
"""The drift from one measurement to the next above which the next one comes sooner."""


class Pace:
    """Of one half of a graph. After a drift beyond `BINADES` the next measurement comes after half as many calls.

    After a smaller one the distance doubles again, up to `rescale`. What was measured is read at the next call, when
    the device has computed it, so that a measurement does not make the host wait.

    Args:
        rescale: the largest number of calls between two measurements.
    """

    def __init__(self, rescale: int) -> None:
        self.rescale = rescale
        self.distance = rescale
        self.history: list[int] = [0]
        """The calls that measured, the last two."""
        self._seen: Tensor | None = None

    def due(self, call: int) -> bool:
        """Returns True if a call, counted from 1, is to measure."""
        early = call < self.rescale and call & (call - 1) == 0
        return early or call % self.rescale == 0 or call - self.history[-1] >= self.distance

    def measured(self, call: int, seen: Tensor) -> None:
        """Remembers what a call measured: float32[operands, 3], as `operations.measure` gives it."""
        self.history = [self.history[-1], call]
        self._seen = seen

    def look_back(self) -> None:
        """Sets the distance to the next measurement by what the last one said."""
        if self._seen is None:
            return
        drift, self._seen = worst(self._seen), None
        since = self.history[-1] - self.history[0]
        self.distance = max(1, since // 2) if drift > BINADES else min(self.rescale, 2 * self.distance)


def worst(seen: Tensor) -> float:
    """The largest drift of any operand in binades; zeros and values that are not finite do not count."""
    drift = seen[:, 0]
    usable = (drift > 0) & (drift < float("inf"))
    return float(drift.where(usable, 1).log2().abs().max())  # amax() of torch_xla 2.9 reduces nothing
