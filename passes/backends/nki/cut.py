"""Cuts flat tensors into lines of columns: which number of columns is quickest, and takes the fewest instructions.

A tensor of N elements is N // columns lines; a tile is 128 of them. One loop runs over the whole tiles, and what is
left is one tile more, or two or three where N is not a multiple of the columns. So the instructions that a compiler
reads grow with the number of tensors and not with their lengths.

Given: `N = 43 * 2**17`, tiles of at most 2048 columns, chunks of at most 512
Result: `Cut(columns=1376, width=344)`: 32 whole tiles and nothing left, instead of 21 of 2048 columns and half a tile
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from collage_neuron.numerics.block_words import BLOCK
from collage_neuron.passes.backends.nki.hardware import LEAST_CYCLES, PARTITIONS
from collage_neuron.passes.backends.nki.tiling import Tiling

SLOWER = 9 / 8
"""A cut may take so much longer than the quickest one, if fewer instructions have to be compiled for it."""


TILE_CYCLES = 512
"""What a tile takes beside its columns. [inferred] Half a microsecond to start its DMAs; [BW] has more, and in part
hidden."""


ODD = (3, 5, 7)
"""Columns for the few lengths that leave a single line otherwise, such as 257."""


class Cut(NamedTuple):
    """How tensors are cut."""

    columns: int
    width: int
    """Columns that an instruction takes: a divisor of `columns`."""
    length: int = 0
    """The length of a row of the parameter, if blocks of its elements share words."""

    @property
    def arguments(self) -> tuple[int, ...]:
        """The last arguments of a kernel."""
        return (*([self.length] if self.length else []), self.columns, self.width)


class Part(NamedTuple):
    """Tiles of one shape: their number, and their lines, columns, and columns an instruction takes."""

    tiles: int
    lines: int
    columns: int
    width: int
    block: int = 0
    """Elements that share a word, if any do."""
    strips: int = 1
    """Number of times that the tiles are run over, for other columns of the same lines."""


def parts_of(total: int, cut: Cut) -> list[Part]:
    """The tiles of `total` elements, by shape: what `_update` of `emit.py` does."""
    found = _in_rows(total, cut) if cut.length else _flat(total, cut)
    return [part for part in found if part.tiles and part.lines and part.columns and part.strips]


def _flat(total: int, cut: Cut) -> Iterator[Part]:
    columns, width = cut.columns, cut.width
    lines = total // columns
    across, last = divmod(total - lines * columns, PARTITIONS)
    yield Part(lines // PARTITIONS, PARTITIONS, columns, width)
    yield Part(1, lines % PARTITIONS, columns, width)
    yield Part(1, PARTITIONS, across, across)
    yield Part(1, last, 1, 1)


def _in_rows(total: int, cut: Cut) -> Iterator[Part]:
    columns, width, length = cut
    whole, rest = length // BLOCK * BLOCK, length % BLOCK
    lines, strips = (total // columns, 1) if not rest else (total // length, whole // columns)
    for tiles, of_lines in ((lines // PARTITIONS, PARTITIONS), (1, lines % PARTITIONS)):
        yield Part(tiles, of_lines, columns, width, BLOCK, strips)
        yield Part(tiles, of_lines, rest, rest, max(rest, 1))


@cache
def cut_of(total: int, tiling: Tiling, length: int = 0) -> Cut:
    """How to cut `total` elements, in rows of `length` if blocks of them share words.

    The cut is the one with the fewest parts of tiles, of those that are quick and have no tile of a single line, which
    the older dialect has known issues with.
    """
    candidates = list(_candidates(total, tiling, length))
    fine = [c for c in candidates if all(part.lines > 1 for part in parts_of(total, c))] or candidates
    most = min(_cycles(total, c) for c in fine) * SLOWER
    return min(
        (c for c in fine if _cycles(total, c) <= most), key=lambda c: (_chunks(total, c), _cycles(total, c), -c.width)
    )


def _candidates(total: int, tiling: Tiling, length: int) -> Iterator[Cut]:
    """Columns that divide what is to be cut; if words are not shared, also some that do not."""
    if length:
        whole = length // BLOCK * BLOCK
        blocks = (total if whole == length else whole) // BLOCK
        for n in _divisors(max(blocks, 1), tiling.columns // BLOCK):
            yield Cut(n * BLOCK, BLOCK * max(_divisors(n, tiling.chunk // BLOCK)), length)
        return
    for columns in _divisors(total, tiling.columns):
        yield Cut(columns, max(_divisors(columns, tiling.chunk)))
    yield from (Cut(n, n) for n in ODD if n <= min(total, tiling.chunk))
    for columns in range(tiling.chunk, min(total, tiling.columns) + 1, tiling.chunk):
        yield Cut(columns, tiling.chunk)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _chunks(total: int, cut: Cut) -> int:
    """The number of times that the instructions of a chunk are written, if loops over tiles are not unrolled."""
    return sum(part.strips * (part.columns // part.width) for part in parts_of(total, cut))


def _cycles(total: int, cut: Cut) -> int:
    """What an instruction with one cycle a column takes for all tiles, with what it and a tile take to start."""
    parts = parts_of(total, cut)
    return sum(p.tiles * p.strips * (TILE_CYCLES + p.columns + LEAST_CYCLES * p.columns // p.width) for p in parts)
