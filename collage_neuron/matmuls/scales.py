"""The powers of two of all operands of a model: one vector, in which graphs share those of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from collage_neuron.passes.fp8_scaling.scaled_matmul import LIMITS, fitting
from collage_neuron.passes.fp8_scaling.sizes import Size


def size_of(x: Tensor) -> Size:
    """The size of a tensor, measured: waits for the device."""
    wide = x.detach().float()
    if not wide.numel():
        return Size(-math.inf)
    top = wide.abs().max()
    shaped = wide / torch.where(top > 0, top, 1)  # so that no square of 1e30 overflows
    rms = shaped.square().mean().sqrt()
    roomy = fitting(shaped, torch.ones_like(top), rms, "e4m3") != rms
    numbers = torch.stack([top, rms, (wide >= 0).all().float(), roomy.float()])
    largest, relative, positive, is_roomy = numbers.tolist()  # one program and one wait, however many numbers
    if largest == 0 or not math.isfinite(relative * largest):
        return Size(-math.inf if largest == 0 else math.inf)
    return Size(math.log2(relative * largest), bool(positive), -math.log2(relative) if is_roomy else 0.0)


def finite_part(x: Tensor) -> Tensor:
    """A tensor with zeros in place of what is not finite: an example of what one bad row is like without it."""
    return x.detach().nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x


@dataclass
class Measurement:
    """What the last measurement said of an operand."""

    drift: float
    """The power of two by which its scale was off."""
    saturated: float
    """The part of its squares that was lost to elements larger than the largest number."""
    vanished: float
    """The part of its elements that became zero, of those that were not."""

    @property
    def binades(self) -> float:
        """The logarithm of the drift; 0 of zeros, and of values that are not finite."""
        return math.log2(self.drift) if 0 < self.drift < math.inf else 0.0


@dataclass
class Scales:
    """The scale of each operand by name; `inverse` is what its values are about as large as."""

    places: dict[str, int] = field(default_factory=dict)
    inverse: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.float32, device="cpu"))
    last: Tensor = field(default_factory=lambda: torch.ones(0, 3, dtype=torch.float32, device="cpu"))
    """Float32[operands, 3], as `measure` gives it; zeros where nothing was measured yet."""
    measured: set[str] = field(default_factory=set)
    """The operands that were measured, though all that was found may be zeros."""
    settled: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool, device="cpu"))
    """True for operands of which a measurement found a size."""
    limit: Tensor = field(default_factory=lambda: torch.ones(0, dtype=torch.float32, device="cpu"))
    """The largest scale of each, and the inverse of the smallest."""

    def include(self, exponents: Mapping[str, int], formats: Mapping[str, str], device: torch.device) -> None:
        """Adds operands, and sets those of which no size was measured yet to what an analysis says."""
        added = [name for name in exponents if name not in self.places]
        self.places.update({name: len(self.places) + i for i, name in enumerate(added)})
        limits = torch.tensor([2.0 ** LIMITS[formats[name]] for name in added], device=device, dtype=torch.float32)
        self.limit = torch.cat([self.limit.to(device), limits])
        self.inverse = torch.cat([self.inverse.to(device), torch.ones_like(limits)])
        self.last = torch.cat([self.last.to(device), limits.new_zeros(len(added), 3)])
        self.settled = torch.cat([self.settled.to(device), torch.zeros_like(limits, dtype=torch.bool)])
        if exponents:
            at, powers = self.at(exponents), [2.0**e for e in exponents.values()]
            given = torch.tensor(powers, device=device, dtype=torch.float32)
            self.inverse = self.inverse.index_put((at,), torch.where(self.settled[at], self.inverse[at], given))

    def at(self, names: Sequence[str] | Mapping[str, int]) -> Tensor:
        """The places of operands in the vector."""
        return torch.tensor([self.places[name] for name in names], device=self.inverse.device, dtype=torch.int64)

    def powers(self, names: Sequence[str]) -> Tensor:
        """float32[2, operands]: scales, and their inverses."""
        inverse = self.inverse[self.at(names)] if names else self.inverse[:0]
        return torch.stack([1 / inverse, inverse])

    def follow(self, names: Sequence[str], seen: Tensor) -> None:
        """Shifts the scales of operands by what was measured; of zeros and of values that are not finite they stay."""
        at, drift = self.at(names), seen[:, 0]
        found = usable(drift)
        moved = torch.where(found, self.inverse[at] * drift, self.inverse[at])
        # Nothing in place: calls may be in `inference_mode`, whose tensors cannot be written outside of it.
        self.inverse = self.inverse.index_put((at,), moved.clamp(1 / self.limit[at], self.limit[at]))
        self.last = self.last.index_put((at,), seen)
        self.settled = self.settled.index_put((at,), self.settled[at] | found)
        self.measured.update(names)

    def again(self, names: Sequence[str], seen: Tensor) -> Tensor:
        """bool[operands]: those to measure again soon: of zeros that were never anything else, or not finite."""
        return ~self.settled[self.at(names)] | ~(seen[:, 0] < torch.inf)

    def unsettled(self) -> list[str]:
        """The operands that were measured, but were zero or not finite each time. Waits for the device."""
        settled = self.settled.cpu().tolist()
        return [name for name, place in self.places.items() if name in self.measured and not settled[place]]

    def beyond(self) -> list[str]:
        """The operands whose scale is at its limit: larger or smaller values are cut off. Waits for the device."""
        inverse, limit = self.inverse.cpu(), self.limit.cpu()
        at_limit = ((inverse >= limit) | (inverse <= 1 / limit)).tolist()
        return [name for name, place in self.places.items() if at_limit[place]]

    def exponents(self) -> dict[str, int]:
        """The exponent of each operand. Waits for the device."""
        logs = self.inverse.cpu().log2().round().int().tolist()
        return {name: logs[place] for name, place in self.places.items()}

    def seen(self) -> dict[str, Measurement]:
        """What was measured last of each operand. Waits for the device."""
        rows = self.last.cpu().tolist()
        return {name: Measurement(*rows[self.places[name]]) for name in self.places if name in self.measured}


def usable(drift: Tensor) -> Tensor:
    """True for what was measured of values that are finite, and not all zero."""
    return (drift > 0) & (drift < torch.inf)


def worst(seen: Tensor) -> float:
    """The largest drift of any operand in binades; zeros and values that are not finite do not count."""
    return float(binades(seen).max()) if len(seen) else 0.0  # amax() of torch_xla 2.9 reduces nothing


def binades(seen: Tensor) -> Tensor:
    """The binades by which the scale of each operand was off, either way; 0 of what is not usable."""
    drift = seen[:, 0]
    return drift.where(usable(drift), 1).log2().abs()
