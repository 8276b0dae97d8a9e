"""The powers of two of all operands of a model: one vector, which the graphs of all shapes share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collage_neuron.passes.scaling.sizes import Size


def size_of(x: Tensor) -> Size:
    """The size of a tensor, measured: waits for the device."""
    wide = x.detach().float()
    if not wide.numel():
        return Size(-math.inf)
    largest = float(wide.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return Size(-math.inf if largest == 0 else math.inf)
    rms = float((wide / largest).square().mean().sqrt()) * largest  # no square of 1e30
    return Size(math.log2(rms), bool((wide >= 0).all()))


@dataclass
class Seen:
    """What the last measurement said of an operand."""

    drift: float
    """The power of two by which its scale was off."""
    saturated: float
    """The part of its elements that were larger than the largest number."""
    vanished: float
    """The part of its elements that became zero, of those that were not."""


@dataclass
class Scales:
    """The scale of each operand by name; `inverse` is what its values are about as large as."""

    places: dict[str, int] = field(default_factory=dict)
    inverse: Tensor = field(default_factory=lambda: torch.ones(0))
    last: Tensor = field(default_factory=lambda: torch.ones(0, 3))
    """Float32[operands, 3], as `measure` gives it; zeros where nothing was measured yet."""
    measured: set[str] = field(default_factory=set)

    def include(self, exponents: Mapping[str, int], device: torch.device) -> None:
        """Adds operands, and sets those that were not measured yet to what an analysis says."""
        for name in exponents:
            self.places.setdefault(name, len(self.places))
        new = len(self.places) - len(self.inverse)
        self.inverse = torch.cat([self.inverse.to(device), torch.ones(new, device=device)])
        self.last = torch.cat([self.last.to(device), torch.zeros(new, 3, device=device)])
        fresh = {name: e for name, e in exponents.items() if name not in self.measured}
        if fresh:
            self.inverse[self.at(fresh)] = torch.tensor([2.0**e for e in fresh.values()], device=device)

    def at(self, names: Sequence[str] | Mapping[str, int]) -> Tensor:
        """The places of operands in the vector."""
        return torch.tensor([self.places[name] for name in names], device=self.inverse.device)

    def powers(self, names: Sequence[str]) -> Tensor:
        """float32[2, operands]: scales, and their inverses."""
        inverse = self.inverse[self.at(names)] if names else self.inverse[:0]
        return torch.stack([1 / inverse, inverse])

    def follow(self, names: Sequence[str], seen: Tensor) -> None:
        """Shifts the scales of operands by what was measured; of zeros and of values that are not finite they stay."""
        at, drift = self.at(names), seen[:, 0]
        usable = (drift > 0) & (drift < torch.inf)
        moved = torch.where(usable, self.inverse[at] * drift, self.inverse[at])
        self.inverse[at] = moved.clamp(2.0**-60, 2.0**60)
        self.last[at] = seen
        self.measured.update(names)

    def exponents(self) -> dict[str, int]:
        """The exponent of each operand. Waits for the device."""
        logs = self.inverse.cpu().log2().round().int().tolist()
        return {name: logs[place] for name, place in self.places.items()}

    def seen(self) -> dict[str, Seen]:
        """What was measured last of each operand. Waits for the device."""
        rows = self.last.cpu().tolist()
        return {name: Seen(*rows[self.places[name]]) for name in self.places if name in self.measured}
