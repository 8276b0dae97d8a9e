"""What an estimate assumes beside documented cycles: as documented, and as AWS measured its own kernel to run.

The one optimizer kernel with public times is AWS's fused AdamW (nki-library, experimental/optimizer/fused_adam.py):
its test (`test_perf_roofline`) has "manual profiling results" on a logical core of trn2, two physical cores, and says
that it is bound by memory. For trn1 a user of a trn1.2xlarge published what copies reach. For trn3 nothing is
published: the same share of its bandwidth is assumed as of trn2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from collage_neuron.passes.backends.nki.hardware import TARGETS


class Measured(NamedTuple):
    """A kernel that AWS measured on trn2."""

    elements: int
    bytes: int
    """Read and written, of an element."""
    milliseconds: float
    cores: int

    @property
    def bandwidth(self) -> float:
        """GB/s of a core."""
        return self.elements * self.bytes / self.milliseconds / 1e6 / self.cores


ADAMW_BF16 = Measured(823_186_880, 14, 25.8, 2)
ADAMW_FP32 = Measured(165_117_392, 28, 11.95, 2)


SHARE = ADAMW_BF16.bandwidth / TARGETS["trn2"].bandwidth

REACHED = {
    "trn1": (273.0, 227.0),  # pantheonneuron, trn1.2xlarge: read 273, written 227 to 275, of which the least
    **{target: (SHARE * TARGETS[target].bandwidth,) * 2 for target in ("trn2", "trn3")},
}
"""GB/s that a core reads and writes."""


@dataclass(frozen=True, eq=False)
class Figures:
    """The assumptions of an estimate."""

    bandwidth: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """GB/s that a core reads and writes, by target; the documented bandwidth where it has none."""
    barrier: float = 9_000.0
    """Nanoseconds for which a loop that the device runs waits between turns, in which nothing overlaps across them
    (nki-library, "about 9 us": its advice on dynamic loops)."""
    start: float = 600.0
    """Nanoseconds to start a DMA of such a loop, whose descriptor is generated (same source); one after the other."""
    turn: float = 0.0
    """Cycles that an access to PSUM takes beside its columns, where Vector and Scalar take turns at it."""
    gpsimd: float = 1.0
    """The factor of the cycles inferred for GpSimd."""
    own_table: bool = False
    """True if ScalarE's copies, squares, magnitudes and signs are in a table of their own, instead of in every one."""


DOCUMENTED = Figures()

CALIBRATED = Figures(bandwidth=REACHED, turn=60.0)
"""[A2]: to start an access to SBUF or PSUM takes about 60 cycles, which engines "can typically hide" in part; where
two engines take turns none of it is taken as hidden."""

DOUBTS: Mapping[str, tuple[Figures, Figures]] = {
    "GpSimd 1 to 4 cycles": (replace(CALIBRATED, gpsimd=0.5), replace(CALIBRATED, gpsimd=2.0)),
    "PSUM 0 to 120 cycles": (replace(CALIBRATED, turn=0.0), replace(CALIBRATED, turn=120.0)),
    "copies in every table, or in their own": (CALIBRATED, replace(CALIBRATED, own_table=True)),
}
"""The three most doubtful figures, each with the rest as calibrated."""
