"""Between two powers of a block: the largest element is drawn there too, so that no average stops at a power of two.

No code of a block means 2 * P or more, and its largest element is never stored as less than P, so that P is found again
from what was stored. Between the value of the largest code and 2 * P, and between P and the smallest code of what is P
or more, is a gap. In words of 8 bits it is a few per cent wide, and an average with b = .999 moves by less in a step:
always stored as the nearer end, the largest elements of blocks would stand still for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from collage_neuron.numerics.blocks import BLOCK
from collage_neuron.numerics.eft import Value, block_max, fp32, inverse_power_of_two, power_of_block


class Drawn(NamedTuple):
    """What the power of two of a block follows from, and the number by which each element is drawn."""

    top: Value
    u: Value


@dataclass(frozen=True)
class Gap:
    """The gap around a power of two, in halves of it."""

    below: float
    """What the largest code of the power before it means."""
    above: float
    """What the smallest code of the largest element of a block means."""
    least: float
    """The smallest power of two of a block."""

    def draw(self, size: Value, u: Value, other: Value) -> Drawn:
        """The size, or if it is in a gap one of its ends, drawn by `other`: a block's power is that of the largest.

        The size itself is then to be drawn by the number returned: u, or in a gap `other`, both uniform from 0 to 1.
        If other elements keep the power, it is drawn between the codes beside it. The gap is a part of their interval,
        so what goes up here goes up there, and is stored as the end above; if none keeps it, what is drawn down here is
        the largest code of the power before. So the expectation is the size in both cases.
        """
        power = self.power(size)
        y = size * inverse_power_of_two(power)
        up = other * fp32(self.above - self.below) < y - self.below
        ends = torch.maximum(size, power * (self.above / 2)), torch.minimum(size, power * (self.below / 2))
        inside = torch.where(y < self.above, other, u)
        return Drawn(torch.where(up, *ends), torch.where(y > self.below, inside, u))

    def power(self, size: Value) -> Value:
        """The power of two that a size belongs to, or that it may be drawn up to; infinite beyond the largest."""
        return power_of_block(size * fp32(2 / self.below * (1 + 2**-22)), self.least)

    def largest(self, size: torch.Tensor) -> torch.Tensor:
        """The largest power of two that the block of each element may have."""
        found: torch.Tensor = self.power(block_max(size, BLOCK)).clamp(max=2.0**127)
        return found
