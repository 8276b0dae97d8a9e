"""Estimates the cost of a kernel from documented figures: bytes, instructions and cycles, and what bounds it.

The unit is one column: one element in each of 128 partitions, that is 128 parameters. The estimate assumes that all
engines work in parallel, which is the purpose of two buffers for each tile. We have measured nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki import hardware
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, Generation
from collage_neuron.passes.backends.nki.ir import itemsize
from collage_neuron.passes.backends.nki.schedule import Plan, shape_of, table_loads
from collage_neuron.passes.backends.nki.tiling import Tiling


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


def estimate(plan: Plan, tiling: Tiling, g: Generation) -> Estimate:
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
        cycles[engine] += used[engine] * g.clock[engine]
        instructions[engine] += 1
        for resource, time in used.items():
            times[resource] += time
    return Estimate(
        read=read,
        written=written,
        instructions=instructions,
        cycles=cycles,
        times=dict(times),
        table_loads=loads,
        memory=PARTITIONS * (read + written + shared) / g.bandwidth,
        sbuf=tiling.sbuf,
    )
