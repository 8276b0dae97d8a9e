"""The time of a step's kernel on Trainium: the cost model of `passes/backends/nki`, calibrated, and compiled loops.

What an estimate assumes beside documented cycles is here as others measured it. The one optimizer kernel with public
times is AWS's fused AdamW (nki-library, experimental/optimizer/fused_adam.py): its test (`test_perf_roofline`) has
"manual profiling results" on a logical core of trn2, two physical cores, and says that it is bound by memory. For trn1
a user of a trn1.2xlarge published what copies reach. For trn3 nothing is published: the same share of its bandwidth is
assumed as of trn2's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from collage_neuron.passes.backends.nki.dialects import DIALECTS
from collage_neuron.passes.backends.nki.docstring import Design
from collage_neuron.passes.backends.nki.emit import Work
from collage_neuron.passes.backends.nki.hardware import PARTITIONS, TARGETS, times_of
from collage_neuron.passes.backends.nki.schedule import shape_of
from collage_neuron.passes.backends.nki.tiling import Part, parts_of, turns_of


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


class Column(NamedTuple):
    """What a column of a kernel takes, in nanoseconds."""

    times: dict[str, float]
    """By engine, and by port that two engines share."""
    transfer: float
    """That of the DMA, at the bandwidth that is reached."""

    @property
    def bound(self) -> str:
        """The busiest engine or port."""
        return max(self.times, key=self.times.__getitem__)

    @property
    def longest(self) -> float:
        """The time of what takes longest."""
        return max(*self.times.values(), self.transfer)


@lru_cache(256)
def calibrated(kernel: Design) -> Column:
    """What a column of a kernel takes by the calibrated figures."""
    plan, chunk, g, cost = kernel.plan, kernel.tiling.chunk, kernel.generation, kernel.cost
    times = dict(cost.times)
    for value, i in plan.steps:
        used = [resource for resource, _ in times_of(i.kind, i.engine, shape_of(value, i, plan.in_psum), g, chunk)]
        for resource in used if "psum port" in used else ():
            times[resource] += TURN / chunk / g.clock[i.engine]
    of_reads, of_writes = REACHED[g.target]
    written = cost.memory * g.bandwidth / PARTITIONS - cost.read  # with the words that blocks share
    return Column(times, PARTITIONS * (cost.read / of_reads + written / of_writes))


@lru_cache(4096)
def time_of(work: Work, cores: int = 1) -> float:
    """Nanoseconds of the update of one parameter, on the last one of so many cores."""
    return sum(_of_part(work, part) for part in parts_of(work.total, work.cut, cores))


def _turns(work: Work, part: Part) -> int:
    return turns_of(part.tiles, work.cut) if DIALECTS[work.kernel.dialect].loops else 0


def _of_part(work: Work, part: Part) -> float:
    turns, (compute, move, _) = _turns(work, part), _of_tile(work.kernel, part)
    looped = turns * _turn(work, part) if turns else 0.0
    return part.strips * (looped + (part.tiles - turns * work.cut.tiles) * max(compute, move))


def _turn(work: Work, part: Part) -> float:
    """The share of one parameter in a turn.

    A turn is the barrier, the load of its first tile, the store of its last one, and in between what takes longest.
    """
    compute, move, starts = _of_tile(work.kernel, part)
    tiles = work.cut.tiles * work.beside
    return (BARRIER + move + max(tiles * compute, (tiles - 1) * move, tiles * starts)) / work.beside


def _of_tile(kernel: Design, part: Part) -> tuple[float, float, float]:
    """What the busiest engine, the DMAs, and starting these one after the other take for a tile."""
    cost, program = calibrated(kernel), kernel.plan.program
    moved = len(program.loads) + len(program.stores) + bool(program.measures)
    columns = part.columns
    compute = max(cost.times.values(), default=0.0) * columns
    return compute, cost.transfer * columns * part.lines / PARTITIONS, START * moved
