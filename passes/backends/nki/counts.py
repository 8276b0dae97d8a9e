"""Counts the instructions of kernels: those that a compiler reads (traced), and those that run (unrolled).

A compiler's time and memory follow the first count, or, where its back end unrolls loops again, the second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from collage_neuron.passes.backends.nki.cut import Part, parts_of
from collage_neuron.passes.backends.nki.lower import Kernel


class Count(NamedTuple):
    """Instructions of every engine and DMAs."""

    traced: int
    unrolled: int

    def plus(self, other: Count) -> Count:
        """Those of two kernels."""
        return Count(self.traced + other.traced, self.unrolled + other.unrolled)


def count_of(kernel: Kernel, shape: Sequence[int]) -> Count:
    """The instructions that update a parameter of a shape; without the one that loads the numbers of the step."""
    total = 1
    for n in shape:
        total *= n
    count = Count(0, 0)
    for part in parts_of(total, kernel.cut(shape)):
        count = count.plus(_of_part(kernel, part))
    return count


def _of_part(kernel: Kernel, part: Part) -> Count:
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
    looped = part.tiles > kernel.design.generation.unrolled
    return Count(tile * part.strips * (1 if looped else part.tiles), unrolled)
