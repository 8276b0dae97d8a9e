"""When operands are measured: at calls 1 to 4, 8, 16, ... and every `rescale`th, and sooner while they drift fast.

If `rescale` is even, every second time it is the call after: else batches that come in turns would never be measured
but for one of them.
"""

from __future__ import annotations

from torch import Tensor

from collage_neuron.matmuls.scales import worst

BINADES = 2.0
"""The drift from one measurement to the next above which the next one comes sooner."""


class Recalibration:
    """When one half of a graph measures its operands.

    After a drift beyond `BINADES` the next measurement comes after half as many calls. After a smaller one the distance
    doubles again, up to `rescale`. What was measured is read at the next call, when the device has computed it, so that
    a measurement does not make the host wait.

    Args:
        rescale: the largest number of calls between two measurements.
    """

    def __init__(self, rescale: int) -> None:
        self.rescale = rescale
        self._most = rescale + (rescale % 2 == 0)
        self.distance = self._most
        self.history: list[int] = [0]
        """The calls that measured, the last two."""
        self.begin = 0
        """The call from which 1, 2, 4, 8, ... are counted."""
        self._last: Tensor | None = None
        self._again: Tensor | None = None

    def due(self, call: int) -> bool:
        """Returns True if a call, counted from 1, is to measure."""
        n = call - self.begin
        early = n < self.rescale and (n & (n - 1) == 0 or n == 3)
        shift = call // self.rescale % 2 if self.rescale % 2 == 0 else 0
        return early or (call - shift) % self.rescale == 0 or call - self.history[-1] >= self.distance

    def is_first(self, call: int) -> bool:
        """Returns True for the first call, or the first after a restart."""
        return call - self.begin == 1

    def restart(self, call: int) -> None:
        """Makes a call due, and others after it, as if it were the first."""
        self.begin = call - 1
        self.distance = self._most

    def measured(self, call: int, seen: Tensor, again: Tensor | None = None) -> None:
        """Remembers what a call measured: float32[operands, 3], as `operations.measure` gives it.

        Args:
            call: its number.
            seen: the measurement.
            again: True for operands that it says nothing of, so that the next call measures too.
        """
        self.history = [self.history[-1], call]
        self._last, self._again = seen, again

    def look_back(self) -> Tensor | None:
        """Sets the distance to the next measurement by what the last one said, and returns that, once."""
        seen, again = self._last, self._again
        self._last = self._again = None
        if seen is None:
            return None
        seen = seen.cpu()  # what is computed of it here is no program for the device
        since = self.history[-1] - self.history[0]
        if again is not None and bool(again.cpu().any()):
            self.distance = 1
        else:
            self.distance = max(1, since // 2) if worst(seen) > BINADES else min(self._most, 2 * self.distance)
        return seen
