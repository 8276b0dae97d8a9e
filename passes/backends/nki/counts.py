"""Counts the instructions of kernels: those that a compiler reads (traced), and those that run (unrolled).

A compiler's time and memory follow the first count, or, where its back end unrolls loops again, the second one.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

from collage_neuron.passes.backends.nki.cut import Cut, Part, parts_of, turns_of
from collage_neuron.passes.backends.nki.lower import Kernel


class Count(NamedTuple):
    """Instructions of every engine and DMAs."""

    traced: int
    unrolled: int

    def plus(self, other: Count) -> Count:
        """Those of two kernels."""
        return Count(self.traced + other.traced, self.unrolled + other.unrolled)


def count_as(kernel: Kernel, total: int, cut: Cut, cores: int = 1) -> Count:
    """Those that update so many elements, cut so, on the last one of so many cores."""
    return reduce(Count.plus, (_of_part(kernel, part, cut) for part in parts_of(total, cut, cores)), Count(0, 0))


def _of_part(kernel: Kernel, part: Part, cut: Cut) -> Count:
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
