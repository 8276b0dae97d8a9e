"""Estimates the cost of a kernel from documented figures: bytes, instructions and cycles, and what bounds it.

The unit is one column: one element in each of 128 partitions, that is 128 parameters. The estimate assumes that all
engines work in parallel, which is the purpose of two buffers for each tile. We have measured nothing.

What an estimate assumes beside documented cycles is as documented, or, if it is calibrated, as others measured. The one
optimizer kernel with public times is AWS's fused AdamW (nki-library, experimental/optimizer/fused_adam.py): its test
(`test_perf_roofline`) has "manual profiling results" on a logical core of trn2, two physical cores, and says that it is
bound by memory. For trn1 a user of a trn1.2xlarge published what copies reach. For trn3 nothing is published: the same
share of its bandwidth is assumed as of trn2's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki import hardware
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, TARGETS, Generation
from collage_neuron.passes.backends.nki.ir import itemsize
from collage_neuron.passes.backends.nki.schedule import Plan, shape_of, table_loads
from collage_neuron.passes.backends.nki.tiling import Tiling


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


# An element in bf16: 8 bytes read (parameter, gradient, both moments), and 6 written (all but the gradient).
ADAMW_BF16 = Measured(823_186_880, 14, 25.8, 2)


SHARE = ADAMW_BF16.bandwidth / TARGETS["trn2"].bandwidth

REACHED = {
    "trn1": (273.0, 227.0),  # pantheonneuron, trn1.2xlarge: read 273, written 227 to 275, of which the least
    **{target: (SHARE * TARGETS[target].bandwidth,) * 2 for target in ("trn2", "trn3")},
}
"""GB/s that a core reads and writes."""


BARRIER = 9_000.0
"""Nanoseconds for which a loop that the device runs waits between turns, in which nothing overlaps across them
(nki-library, "about 9 us": its advice on dynamic loops)."""

START = 600.0
"""Nanoseconds to start a DMA of such a loop, whose descriptor is generated (same source); one after the other."""

TURN = 60.0
"""Cycles that an access to PSUM takes beside its columns, where Vector and Scalar take turns at it. [A2]: to start an
access to SBUF or PSUM takes about 60 cycles, which engines "can typically hide" in part; none of it is taken as hidden.
"""


@dataclass(frozen=True)
class Estimate:
    """The cost of a kernel on a target; times are in nanoseconds per column."""

    read: int
    written: int
    """Bytes per parameter, without the words that blocks share."""
    instructions: dict[str, int]
    cycles: dict[str, float]
    """Cycles per column, by engine."""
    times: dict[str, float]
    """By engine, and by port that two engines share; the time of ScalarE includes loading its tables."""
    table_loads: int
    """Number of function tables that ScalarE loads per DMA tile."""
    memory: float
    """The time of the DMA, at the documented bandwidth."""
    transfer: float
    """The time of the DMA, at the bandwidth that is assumed."""
    sbuf: int
    """Bytes per partition, with two buffers for each tile."""

    @property
    def bytes(self) -> int:
        """Bytes per parameter, read and written."""
        return self.read + self.written

    @property
    def bound(self) -> str:
        """The busiest engine or port."""
        return max(self.times, key=lambda r: self.times[r]) if self.times else "memory"

    @property
    def ratio(self) -> float:
        """Time of the busiest resource over the time of the DMA."""
        return max(self.times.values(), default=0.0) / self.memory

    @property
    def whole(self) -> float:
        """Time of a step, of what bounds it or of its DMA, over the time of the DMA at the documented bandwidth."""
        return max(*self.times.values(), self.transfer) / self.memory


def estimate(plan: Plan, tiling: Tiling, g: Generation, calibrated: bool = False) -> Estimate:
    """The cost of `plan` on the generation `g`."""
    moved = (*plan.program.loads, *plan.program.stores.values())
    read = sum(itemsize(v.dtype) for v in plan.program.loads if not v.block)
    written = sum(itemsize(v.dtype) for v in plan.program.stores.values() if not v.block)
    shared = sum(itemsize(v.dtype) for v in moved if v.block) / BLOCK
    shared += len(plan.program.measures) * itemsize("float32") / tiling.chunk
    cycles, instructions = dict.fromkeys(ENGINES, 0.0), dict.fromkeys(ENGINES, 0)
    loads = table_loads(plan.program)
    times: dict[str, float] = defaultdict(float, {"scalar": loads * hardware.TABLE_LOAD / tiling.columns})
    for value, instruction in plan.steps:
        shape, engine = shape_of(value, instruction, plan.in_psum), instruction.engine
        used = dict(hardware.times_of(instruction.kind, engine, shape, g, tiling.chunk))
        time = used[engine] + (TURN / tiling.chunk / g.clock[engine] if calibrated and "psum port" in used else 0.0)
        cycles[engine] += time * g.clock[engine]
        instructions[engine] += 1
        for resource in used:
            times[resource] += time
    of_reads, of_writes = REACHED[g.target] if calibrated else (g.bandwidth, g.bandwidth)
    return Estimate(
        read=read,
        written=written,
        instructions=instructions,
        cycles=cycles,
        times=dict(times),
        table_loads=loads,
        memory=PARTITIONS * (read + written + shared) / g.bandwidth,
        transfer=PARTITIONS * (read / of_reads + (written + shared) / of_writes),
        sbuf=tiling.sbuf,
    )
