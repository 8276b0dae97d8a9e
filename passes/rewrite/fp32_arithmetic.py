"""The arithmetic "fp32": values are fp32 between load and store, and only the stores round below that."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, Increments, Reader
from collage_neuron.passes.rewrite.accumulators import Accumulator
from collage_neuron.passes.rewrite.arithmetic import Arithmetic


@dataclass(frozen=True)
class Sum(Accumulator):
    """The parameter in fp32 arithmetic: increments are summed first, so that it is rounded once a step.

    Rounded after each of them, it would lose the same part of a small weight decay step after step.

    `p * s` is taken as `p + p * (s - 1)`. 1 - lr * weight_decay is so near 1 that its rounding to fp32 would change
    the decay by up to 2**-25 / (lr * wd); s - 1 is computed on the host, in double, and is off by 2**-53 / (lr * wd)
    at most.
    """

    base: Fp32
    delta: Fp32 | None = None

    def plus(self, a: Arithmetic, increment: Fp32) -> Sum:
        return Sum(self.base, increment if self.delta is None else self.delta + increment)

    def times(self, a: Arithmetic, factor: Fp32) -> Fp32:
        return self.settled * factor

    def scaled(self, a: Arithmetic, factor: Scalar) -> Sum:
        return self.plus(a, self.settled * a.read(factor - 1))

    @property
    def increments(self) -> Increments:
        """What is pending: nothing was added before."""
        return () if self.delta is None else (lambda: self.delta,)

    def read(self, a: Reader) -> Fp32:
        return self.settled

    def off_path(self, a: Reader) -> Fp32:
        return self.settled

    @functools.cached_property
    def settled(self) -> Fp32:
        """The value with what is pending added to it; written into the graph once, whoever reads it."""
        return self.base if self.delta is None else self.base + self.delta


class Fp32Arithmetic(Arithmetic):
    """Values are fp32; the only roundings below that are the formats' own, at the stores."""

    name = "fp32"

    def round(self, x: Fp32) -> Fp32:
        return x

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        value = fmt.decode(components)
        return Sum(value) if name == "param" else value
