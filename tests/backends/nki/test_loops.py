"""Loops over tiles: any number of turns and any remainder, bit for bit, and as many instructions as were counted.

Evidence level: stand-in. What a compiler reads is what its first iterations run; `Trace.traced` counts that.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import pytest
from kernel_tables import divided, llama_7b, size_of
from nki_runs import Step, count_of, differing, run, step_of
from torch import Tensor
from torch_cases import CASES

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki.hardware import PARTITIONS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.tiling import Cut, Tiling, cut_of, parts_of

pytestmark = pytest.mark.usefixtures("short_search")

DIALECTS = ("nki", "beta1")
DEVICE = Tiling(2048, 512, 0)


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


def test_parts_are_all_elements_and_chosen_cuts_fit() -> None:
    g = random.Random(0)
    sizes = [
        *range(1, 4000, 7),
        *(257, 641, 769, 1153, 1409, 2689, 3329, 3457),
        *(g.randrange(1, 10**k) for k in (4, 6, 9) for _ in range(60)),
    ]
    for n in sizes:
        cut = cut_of(n, DEVICE)
        parts = parts_of(n, cut)
        assert sum(p.tiles * p.lines * p.columns for p in parts) == n
        assert all(p.lines <= PARTITIONS and p.columns % p.width == 0 for p in parts)
        assert all(p.columns <= DEVICE.columns and p.width <= DEVICE.chunk for p in parts)
        assert len(parts) <= 6
        assert n == 1 or all(p.lines > 1 for p in parts), n


def test_no_cut_into_two_lines_or_more_has_a_tile_of_one_line() -> None:
    for lines in range(2, 4 * PARTITIONS):
        parts = parts_of(lines * SMALL.columns, SMALL)
        assert all(1 < p.lines <= PARTITIONS for p in parts)
        assert sum(p.tiles * p.lines for p in parts) == lines


def test_parts_of_rows_with_blocks_are_all_elements() -> None:
    g = random.Random(0)
    lengths = [1, 5, 127, 128, 129, 384, 1030, 4096, 11008, 50257, *(g.randrange(1, 20000) for _ in range(60))]
    for length in lengths:
        for lines in (1, 3, 128, 300):
            n = lines * length
            parts = parts_of(n, cut_of(n, DEVICE, length))
            assert sum(p.tiles * p.lines * p.columns * p.strips for p in parts) == n
            assert sum(p.strips for p in parts if p.lines == parts[0].lines) <= length // (DEVICE.columns - BLOCK) + 3
            assert lines == 1 or all(p.lines > 1 for p in parts)
            assert all(p.columns % p.width == 0 and p.width % p.block == 0 for p in parts)
            assert all(p.columns <= DEVICE.columns and p.width <= DEVICE.chunk for p in parts)


# Counts


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n", [127, 3 * TILE + 12, 5 * 128 * 512])
def test_instructions_are_counted_as_they_run(n: int, dialect: str) -> None:
    given, k = step().of_size(n), kernel(dialect)
    for tiles in (1, 3):
        cut = k.cut((n,))._replace(tiles=tiles)
        trace = run(k, given.components, given.vector, cut=cut).machine.trace
        count = count_of(k, (n,), cut)
        assert (trace.traced, len(trace.records)) == (count.traced + 1, count.unrolled + 1)  # one loads the numbers


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", [(300, 256), (3, 5), (131, 2500)])
def test_instructions_on_blocks_are_counted_as_they_run(shape: tuple[int, ...], dialect: str) -> None:
    s = step_of(CASES["sgd_momentum"], {"param": "bf16", "momentum_buffer": "i16q4"}, "fp32", n=math.prod(shape))
    words = (shape[0], -(-shape[1] // BLOCK))
    blocks = s.update.blocks
    components = {k: x[:1].expand(words if k in blocks else shape).contiguous() for k, x in s.components.items()}
    k = lower_to_nki(s.update, "trn1", dialect)
    trace = run(k, components, s.vector).machine.trace
    count = count_of(k, shape)
    assert (trace.traced, len(trace.records)) == (count.traced + 1, count.unrolled + 1)


MOST = 30_000
"""Instructions of Llama-7B that a compiler reads, whatever share of it a core has."""


def traced(dialect: str, shapes: Sequence[tuple[int, ...]]) -> int:
    return size_of(kernel(dialect), list(shapes)).instructions.traced


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_traced_grows_with_tensors_not_with_parameters(dialect: str) -> None:
    shapes = llama_7b()
    assert (len(shapes), sum(map(math.prod, shapes))) == (291, 6_738_415_616)
    counts = [traced(dialect, divided(shapes, cores)) for cores in (1, 8, 32)]
    assert max(counts) <= MOST
    assert max(counts) <= 1.35 * min(counts)  # a length may divide into whole tiles, or leave some lines
    most = 500 if dialect == "beta1" else 2_500  # of up to 16 tiles in a turn
    assert all(traced(dialect, [(n,)]) <= most for n in (10**9, 10**9 + 7, 2**30, 2**30 - 1))
