"""The arithmetic "fp32": values are fp32 between load and store, and only stores round to narrower types."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, Increments, Reader
from collage_neuron.passes.rewrite.arithmetic import Accumulator, Arithmetic


@dataclass(frozen=True)
class Sum(Accumulator):
    """The parameter in fp32 arithmetic: increments are summed first, so that it is rounded once per step.

    If it were rounded after each increment, it would lose the same part of a small weight decay in every step.

    `p * s` is computed as `p + p * (s - 1)`. 1 - lr * weight_decay is so close to 1 that rounding it to fp32 would
    change the decay by up to 2**-25 / (lr * wd); s - 1 is computed on the host, in double, with an error of at most
    2**-53 / (lr * wd). Where s is far from 1 (`is_far`), that would cancel, and the product replaces the parameter.
    """

    base: Fp32
    delta: Fp32 | None = None
    is_old: bool = True
    """False if `base` is not the parameter before the step, so that its increments are not those of the step."""

    def plus(self, a: Arithmetic, increment: Fp32) -> Sum:
        return Sum(self.base, increment if self.delta is None else self.delta + increment, self.is_old)

    def times(self, a: Arithmetic, factor: Fp32) -> Fp32:
        return self.settled * factor

    def scaled(self, a: Arithmetic, factor: Scalar) -> Sum:
        if a.is_far(factor):  # x + x * (0.1 - 1) would cancel nine tenths of x
            return Sum(self.settled * a.read(factor), None, False)
        return self.plus(a, self.settled * a.read(factor - 1))

    @property
    def increments(self) -> Increments:
        """The pending increments; nothing was added before them."""
        return (lambda: self.delta,) if self.is_old and self.delta is not None else ()

    def read(self, a: Reader) -> Fp32:
        return self.settled

    def off_path(self, a: Reader) -> Fp32:
        return self.settled

    @functools.cached_property
    def settled(self) -> Fp32:
        """The value plus the pending increments; written into the graph once, however often it is read."""
        return self.base if self.delta is None else self.base + self.delta


class Fp32Arithmetic(Arithmetic):
    """Values are fp32; the only roundings to narrower types are those of the formats, at the stores."""

    name = "fp32"

    def round(self, x: Fp32) -> Fp32:
        return x

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        value = fmt.decoder(name)(components)
        return Sum(value) if name == "param" else value
