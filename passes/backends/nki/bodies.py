"""Chooses the bodies of compiled loops: tiles of several parameters, or several of each, from a budget of instructions.

A loop that the device runs (`nl.fori_loop`) waits at the end of each turn for all engines, so a turn loads its first
tile and stores its last one with nothing beside them: for one tile that takes longer than its work. So a loop updates
in a turn a tile of each of several parameters of one size, which takes no more instructions than a loop for each; and,
where there are few, several tiles of each, which are copies of their instructions. A step's kernel may have so many of
these (`Generation.instructions`).

Given: 128 parameters of 8 tiles, and 2 of 62
Result: 8 loops, each over 16 of the first, a tile of each in a turn; and one over the others, 8 tiles of each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from collage_neuron.passes.backends.nki.cost import BARRIER, START, Estimate, estimate
from collage_neuron.passes.backends.nki.dialects import DIALECTS
from collage_neuron.passes.backends.nki.docstring import Design
from collage_neuron.passes.backends.nki.emit import BESIDE, Work
from collage_neuron.passes.backends.nki.hardware import PARTITIONS
from collage_neuron.passes.backends.nki.tiling import Cut, Part, parts_of, turns_of

TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Tiles that a turn may have."""

SHARE = 0.1
"""The share of a turn that may be its barrier and what overlaps with nothing: a turn with less gets no more tiles."""


def with_bodies(works: Sequence[Work]) -> list[Work]:
    """The parts of a step's kernel with the bodies of their loops."""
    kernel, counts = works[0].kernel, Counter(works)
    if not DIALECTS[kernel.dialect].loops:
        return list(works)
    chosen = {work: work._replace(beside=1 if work.cut.length else _beside(n)) for work, n in counts.items()}
    chosen = {work: first.with_tiles(1) for work, first in chosen.items()}
    left = kernel.generation.instructions - sum(n * _traced(work) for work, n in counts.items())
    # Greedy: the change that gains most for an instruction, until the budget is used. Kernels have no order, so that
    # ties are left to the order of the parameters.
    while best := max(_changes(chosen, counts, left), key=lambda change: change[:2], default=None):
        _, fewer, work, tiles = best
        chosen[work], left = chosen[work].with_tiles(tiles), left + fewer
    return [chosen[work] for work in works]


def _beside(count: int) -> int:
    """The parameters in the largest of as few loops as take so many: `emit.loops_of` makes these."""
    return -(-count // -(-count // BESIDE))


def _changes(
    chosen: Mapping[Work, Work], counts: Mapping[Work, int], left: int
) -> Iterator[tuple[float, int, Work, int]]:
    """For more tiles a turn of one kind of parameters: what is gained for an instruction, and minus those added."""
    for work, now in chosen.items():
        for tiles in TILES if waiting(now) > SHARE else ():
            other = now.with_tiles(tiles)
            added = counts[work] * (_traced(other) - _traced(now))
            gain = counts[work] * (time_of(now) - time_of(other))
            if tiles > now.cut.tiles and added <= left and gain > 0:
                yield gain / max(added, 1), -added, work, tiles


@lru_cache(4096)
def _traced(work: Work) -> int:
    # One text runs on one core and on two, and the larger count has to fit the budget.
    return max(count_as(*work[:3], cores).traced for cores in (1, work.kernel.generation.cores))


@lru_cache(256)
def calibrated(kernel: Design) -> Estimate:
    """What a column of a kernel costs by the calibrated figures."""
    return estimate(kernel.plan, kernel.tiling, kernel.generation, calibrated=True)


@lru_cache(4096)
def time_of(work: Work, cores: int = 1) -> float:
    """Nanoseconds of the update of one parameter, on the last one of so many cores."""
    return sum(_of_part(work, part) for part in parts_of(work.total, work.cut, cores))


def waiting(work: Work) -> float:
    """The largest share of a turn of its loops in which what takes longest waits; 0 if nothing loops."""
    looped = [part for part in parts_of(work.total, work.cut) if _turns(work, part)]
    alone = (work.cut.tiles * max(_of_tile(work.kernel, part)[:2]) for part in looped)
    shares = (busy / _turn(work, part) for busy, part in zip(alone, looped, strict=True))
    return max((1 - share for share in shares), default=0.0)


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


class Count(NamedTuple):
    """Instructions of every engine and DMAs: those that a compiler reads (traced), and those that run (unrolled).

    A compiler's time and memory follow the first count, or, where its back end unrolls loops again, the second one.
    """

    traced: int
    unrolled: int


def count_as(kernel: Design, total: int, cut: Cut, cores: int = 1) -> Count:
    """Those that update so many elements, cut so, on the last one of so many cores."""
    counts = [_count_of_part(kernel, part, cut) for part in parts_of(total, cut, cores)]
    return Count(sum(c.traced for c in counts), sum(c.unrolled for c in counts))


def _count_of_part(kernel: Design, part: Part, cut: Cut) -> Count:
    plan = kernel.plan
    moved = len(plan.program.loads) + len(plan.program.stores) + bool(plan.program.measures)
    by_block = sum(i.by_block for _, i in plan.steps)
    once = len(plan.steps) - by_block
    if kernel.dialect == "beta1":  # has uniform numbers, and computes bits from them
        once += 2 * sum(i.kind == "rng" for _, i in plan.steps)
    chunks = part.columns // part.width
    tile = moved + chunks * (once + by_block * (part.width // part.block if part.block else 1))
    unrolled = tile * part.tiles * part.strips
    if kernel.dialect == "beta1":  # every loop is one
        return Count(moved + once + by_block, unrolled)
    repeated = max(turns_of(part.tiles, cut) - 1, 0) * cut.tiles  # tiles of all turns but the first
    return Count(tile * part.strips * (part.tiles - repeated), unrolled)
