"""Loops over tiles: any number of turns and any remainder, bit for bit, and few instructions to compile.

Evidence level: stand-in. What a compiler reads is what its first iterations run; `Trace.traced` counts that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
from kernel_tables import divided, llama_7b, size_of
from nki_runs import Step, differing, run, step_of
from torch import Tensor
from torch_cases import CASES

from collage_neuron.passes.backends.nki.hardware import PARTITIONS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.tiling import Cut, parts_of

pytestmark = pytest.mark.usefixtures("short_search")

DIALECTS = ("nki", "beta1")


@cache
def step() -> Step:
    return step_of(CASES["adamw"], "plus", "fp32")


@cache
def kernel(dialect: str) -> Kernel:
    return lower_to_nki(step().update).in_dialect(dialect)


@cache
def expected(n: int) -> dict[str, Tensor]:
    return step().of_size(n).by_reciprocals().expected()


def wrong(dialect: str, n: int, cut: Cut, source: str | None = None) -> dict[str, int]:
    given = step().of_size(n)
    found = run(kernel(dialect), given.components, given.vector, source=source, cut=cut)
    return differing(found.results, expected(n))


SMALL = Cut(6, 2)
TWO = SMALL._replace(tiles=2)
TILE = PARTITIONS * 6
LEFT = (0, 5, 6, 12, 6 * 127, 6 * 127 + 5)
"""Elements after whole tiles: none, less than a line, a line, two, all but one, and nearly a tile."""


@pytest.mark.parametrize(("dialect", "cut"), [("nki", SMALL), ("nki", TWO), ("beta1", SMALL)])
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_any_number_of_turns_and_any_remainder(turns: int, dialect: str, cut: Cut) -> None:
    """With two tiles in a turn, five are two turns and a copy."""
    for left in LEFT:
        if n := turns * TILE + left:
            assert not wrong(dialect, n, cut), left


# Cuts


def test_no_cut_into_two_lines_or_more_has_a_tile_of_one_line() -> None:
    for lines in range(2, 4 * PARTITIONS):
        parts = parts_of(lines * SMALL.columns, SMALL)
        assert all(1 < p.lines <= PARTITIONS for p in parts)
        assert sum(p.tiles * p.lines for p in parts) == lines


# Counts


MOST = 45_000
"""Instructions of Llama-7B that a compiler reads, whatever share of it a core has."""


def traced(dialect: str, shapes: Sequence[tuple[int, ...]]) -> int:
    return size_of(kernel(dialect), list(shapes)).instructions


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_traced_grows_with_tensors_not_with_parameters(dialect: str) -> None:
    shapes = llama_7b()
    assert (len(shapes), sum(map(math.prod, shapes))) == (291, 6_738_415_616)
    counts = [traced(dialect, divided(shapes, cores)) for cores in (1, 8, 32)]
    assert max(counts) <= MOST
    assert max(counts) <= 2 * min(counts)  # with more instructions a turn would have fewer tiles
    most = 500 if dialect == "beta1" else 6_000  # of up to 32 tiles in a turn
    assert all(traced(dialect, [(n,)]) <= most for n in (10**9, 10**9 + 7, 2**30, 2**30 - 1))
