"""The cost of a kernel by the documented figures: bytes, instructions and cycles, and what bounds it.

The unit is one column: one element in each of 128 partitions, 128 parameters. Times are what the engines are busy,
side by side; that they all can be is what two buffers of everything are for. No device was measured.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, TABLE_LOAD, Generation, cost_of, resources
from collage_neuron.passes.backends.nki.ir import itemsize
from collage_neuron.passes.backends.nki.schedule import Plan, shape_of, table_loads
from collage_neuron.passes.backends.nki.tiling import Tiling


@dataclass(frozen=True)
class Estimate:
    """What a kernel costs on a target; times in nanoseconds a column."""

    read: int
    written: int
    """Bytes a parameter."""
    instructions: dict[str, int]
    cycles: dict[str, float]
    """By engine, for one column: an instruction over n columns counts n times its share."""
    times: dict[str, float]
    """By engine, and by port that two engines share; of ScalarE with the loads of its tables."""
    table_loads: int
    """Loads of a function's table by ScalarE, for a DMA tile."""
    memory: float
    """What the DMA needs."""
    sbuf: int
    """Bytes a partition, two buffers of everything."""

    @property
    def bytes(self) -> int:
        """Bytes a parameter, both ways."""
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
    """What `plan` costs on `g`."""
    read = sum(itemsize(v.dtype) for v in plan.program.loads)
    written = sum(itemsize(v.dtype) for v in plan.program.stores.values())
    cycles: dict[str, float] = defaultdict(float)
    loads = table_loads(plan.program)
    times: dict[str, float] = defaultdict(float, {"scalar": loads * TABLE_LOAD / tiling.columns})
    for value, instruction in plan.steps:
        shape = shape_of(value, instruction, plan.in_psum)
        time = cost_of(instruction.kind, instruction.engine, shape, g).time(g, tiling.chunk)
        cycles[instruction.engine] += time * g.clock[instruction.engine]
        for resource in resources(instruction.engine, shape, g):
            times[resource] += time
    count = Counter(instruction.engine for _, instruction in plan.steps)
    return Estimate(
        read=read,
        written=written,
        instructions={e: count[e] for e in ENGINES},
        cycles={e: cycles[e] for e in ENGINES},
        times=dict(times),
        table_loads=loads,
        memory=PARTITIONS * (read + written) / g.bandwidth,
        sbuf=tiling.sbuf,
    )
