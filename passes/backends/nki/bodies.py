"""Chooses the bodies of compiled loops: tiles of several parameters, or several of each, from a budget of instructions.

A loop that the device runs (`nl.fori_loop`) waits at the end of each turn for all engines, so a turn loads its first
tile and stores its last one with nothing beside them: for one tile that takes longer than its work. So a loop updates
in a turn a tile of each of several parameters of one size, which takes no more instructions than a loop for each; and,
up to `TURN` tiles in all, several tiles of each, which are copies of their instructions. A step's kernel may have so
many of these (`Generation.instructions`): where it would have more, turns are shorter.

Given: 128 parameters of 80 tiles, and 2 of 620
Result: 8 loops, each over 16 of the first, two tiles of each in a turn; and one over the others, 16 tiles of each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from collage_neuron.passes.backends.nki.dialects import DIALECTS
from collage_neuron.passes.backends.nki.docstring import Design
from collage_neuron.passes.backends.nki.emit import BESIDE, Work
from collage_neuron.passes.backends.nki.tiling import Cut, Part, parts_of, turns_of

TURN = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""About how many tiles a turn has: the first for which the instructions suffice. To give more of them to the parameters
that wait longest would gain a hundredth of the time on Llama-7B."""


def with_bodies(works: Sequence[Work]) -> list[Work]:
    """The parts of a step's kernel with the bodies of their loops."""
    kernel, counts = works[0].kernel, Counter(works)
    if not DIALECTS[kernel.dialect].loops:
        return list(works)
    alone = {work: work._replace(beside=1 if work.cut.length else _beside(n)) for work, n in counts.items()}
    for turn in TURN:
        chosen = {work: first.with_tiles(max(turn // first.beside, 1)) for work, first in alone.items()}
        if sum(n * _traced(chosen[work]) for work, n in counts.items()) <= kernel.generation.instructions:
            break
    return [chosen[work] for work in works]


def _beside(count: int) -> int:
    """The parameters in the largest of as few loops as take so many: `emit.loops_of` makes these."""
    return -(-count // -(-count // BESIDE))


@lru_cache(4096)
def _traced(work: Work) -> int:
    # One text runs on one core and on two, and the larger count has to fit the budget.
    return max(count_as(*work[:3], cores) for cores in (1, work.kernel.generation.cores))


def count_as(kernel: Design, total: int, cut: Cut, cores: int = 1) -> int:
    """The instructions of every engine, and DMAs, that a compiler reads; its time and memory follow that.

    They update so many elements, cut so, on the last one of so many cores.
    """
    return sum(_count_of_part(kernel, part, cut) for part in parts_of(total, cut, cores))


def _count_of_part(kernel: Design, part: Part, cut: Cut) -> int:
    plan = kernel.plan
    moved = len(plan.program.loads) + len(plan.program.stores) + bool(plan.program.measures)
    by_block = sum(i.by_block for _, i in plan.steps)
    once = len(plan.steps) - by_block
    if kernel.dialect == "beta1":  # every loop is one; it has uniform numbers, and computes bits from them
        return moved + once + by_block + 2 * sum(i.kind == "rng" for _, i in plan.steps)
    chunks = part.columns // part.width
    tile = moved + chunks * (once + by_block * (part.width // part.block if part.block else 1))
    repeated = max(turns_of(part.tiles, cut) - 1, 0) * cut.tiles  # tiles of all turns but the first
    return tile * part.strips * (part.tiles - repeated)
