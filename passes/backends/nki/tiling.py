"""Tiling: the columns of a DMA and of an instruction that fit on chip, and the lines that tensors are cut into.

A DMA tile is wide, for bandwidth: 4 KiB per partition or more saturate the DMA engines. Instructions process it in
chunks, so that intermediate values take little memory, and so that a PSUM tile is one bank. Two buffers of each tile
fit.

A tensor of N elements is N // columns lines; a tile is 128 of them. One loop runs over the whole tiles, and what is
left is one tile more, or two or three where N is not a multiple of the columns. So the instructions that a compiler
reads grow with the number of tensors and not with their lengths. Of the numbers of columns that are quick, one takes
the fewest instructions.

Given: `N = 43 * 2**17`, tiles of at most 2048 columns, chunks of at most 512
Result: `Cut(columns=1376, width=344)`: 32 whole tiles and nothing left, instead of 21 of 2048 columns and half a tile
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki.hardware import LEAST_CYCLES, PARTITIONS, PSUM_BANK, Generation
from collage_neuron.passes.backends.nki.ir import IN_PLACE, Value, itemsize

if TYPE_CHECKING:
    from collage_neuron.passes.backends.nki.schedule import Plan

IN_FLIGHT = 2
"""Buffers of each tile: one is transferred while the other is computed."""

# 2048 columns of bf16 are 4 KiB a partition, with which the DMA engines are saturated ([BW]).
COLUMNS = (2048, 1024, 512)
CHUNKS = (2048, 1024, 512, 256, 128)
DRAWN = 12
"""Bytes of an element's random bits, with what the older dialect computes them from; two are kept."""

SUMMED = 512
"""The most terms that an instruction adds for a monitor: docs/development/evidence.md has its error."""


class OutOfMemory(ValueError):
    """No tiling of an update fits into the memories of a target."""


@dataclass(frozen=True)
class Tiling:
    """Columns of a DMA tile and of a chunk, and the memory that they need."""

    columns: int
    chunk: int
    sbuf: int
    """Bytes per partition with two buffers of every tile, without sharing memory between tiles."""


def tile_of(value: Value) -> Value:
    """The value whose tile holds `value`: a select, for example, overwrites its second operand."""
    while value.op in IN_PLACE:
        value = value.args[IN_PLACE[value.op]]  # type: ignore[assignment]  # a tile
    return value


def wide_tiles(plan: Plan) -> list[Value]:
    """The tiles as wide as a DMA: loads, stores, and values that cross phases."""
    stored = map(tile_of, plan.program.stores.values())
    crossing = [v for v in map(tile_of, plan.crossing) if v not in plan.program.measures]
    assert not any(v.chunk for v in crossing), "what is found of a chunk is read in the same phase, or is a measure"
    return list(dict.fromkeys([*plan.program.loads, *stored, *crossing]))


def bytes_of(tiles: Iterable[Value], columns: int) -> int:
    """Bytes per partition of tiles for so many columns."""
    sizes = ((DRAWN if v.op == "draw" else itemsize(v.dtype), v) for v in tiles)
    return sum(size * (1 if v.chunk else columns // BLOCK if v.block else columns) for size, v in sizes)


def tiling_of(plan: Plan, g: Generation) -> Tiling:
    """The widest tiles that fit.

    Raises:
        OutOfMemory: not even the narrowest ones fit.
    """
    wide, totals = wide_tiles(plan), len(plan.program.measures)
    others = {tile_of(v) for v, _ in plan.steps} - {*wide, *plan.program.measures, *plan.in_psum}
    # A tile in PSUM is one bank of fp32; what is added up for a measure has a bound for its error.
    most = PSUM_BANK // itemsize("float32") if plan.in_psum else SUMMED if totals else max(CHUNKS)
    for columns in COLUMNS:
        for chunk in (c for c in CHUNKS if c <= min(most, columns)):
            tiles = bytes_of(wide, columns) + bytes_of(others, chunk) + 4 * totals * (columns // chunk)
            sbuf = IN_FLIGHT * tiles + 4 * len(plan.columns)
            if sbuf <= g.sbuf:
                return Tiling(columns, chunk, sbuf)
    raise OutOfMemory(
        f"an update of {len(plan.steps)} instructions does not fit into {g.sbuf >> 10} KiB a partition of {g.target}; "
        "use backend='xla'"
    )


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
    tiles: int = 1
    """Tiles in a turn of a loop that the device runs (`import nki`), as copies of their instructions. Tensors with no
    more whole tiles than that have no loop."""
    done: bool = False
    """True if a loop over several tensors updates its whole tiles; `bodies.py` chooses both."""


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


def parts_of(total: int, cut: Cut, cores: int = 1) -> list[Part]:
    """The tiles of `total` elements, by shape: what `_update` of `emit.py` does on the last one of so many cores."""
    found = _in_rows(total, cut, cores) if cut.length else _flat(total, cut, cores)
    return [part for part in found if part.tiles and part.lines and part.columns and part.strips]


def whole_tiles(total: int, cut: Cut) -> int:
    """The whole tiles of a tensor that is cut without regard to its rows."""
    return _tiles(total // cut.columns, 1)[0][0]


def is_looped(total: int, cut: Cut, cores: int) -> bool:
    """Returns True if loops of whole tiles on so many cores update all elements."""
    turns = turns_of(whole_tiles(total, cut) // cores, cut)
    return turns * cut.tiles * PARTITIONS * cut.columns * cores == total


def turns_of(tiles: int, cut: Cut) -> int:
    """The turns of the loop over so many whole tiles in the newer dialect; 0 if there is none."""
    turns = tiles // cut.tiles
    # A loop of one turn would be its instructions and a barrier.
    return turns if turns > 1 else 0


def _tiles(lines: int, cores: int) -> list[tuple[int, int]]:
    """The tiles of the last one of so many cores, which has what is left too: (number, lines of each).

    On one core none has one line, unless there is one line in all.
    """
    share = lines // cores
    whole = share // PARTITIONS
    # A remainder of one line takes a whole tile with it: 129 lines are a tile of 127 and one of 2.
    whole -= bool(whole and share % PARTITIONS == 1)
    left = lines - share * (cores - 1) - whole * PARTITIONS
    rest = [(1, PARTITIONS - 1), (1, left - PARTITIONS + 1)] if left > PARTITIONS else [(1, left)]
    return [(whole, PARTITIONS), *rest]


def _flat(total: int, cut: Cut, cores: int) -> Iterator[Part]:
    columns, width = cut.columns, cut.width
    lines = total // columns
    across, last = divmod(total - lines * columns, PARTITIONS)
    yield from (Part(tiles, of_lines, columns, width) for tiles, of_lines in _tiles(lines, cores))
    yield Part(1, PARTITIONS // cores, across, across)
    yield Part(1, -(-last // cores), 1, 1)


def _in_rows(total: int, cut: Cut, cores: int) -> Iterator[Part]:
    columns, width, length, *_ = cut
    whole, rest = length // BLOCK * BLOCK, length % BLOCK
    if not rest or total == length:  # words and elements lie side by side, but for the short block at the end of a row
        lines = (total - rest) // columns
        yield from (Part(tiles, n, columns, width, BLOCK) for tiles, n in _tiles(lines, cores))
        yield Part(1, 1, rest, rest, max(rest, 1))
        return
    for tiles, n in _tiles(total // length, cores):
        yield Part(tiles, n, columns, width, BLOCK, whole // columns)
        yield Part(tiles, n, whole % columns, width, BLOCK)
        yield Part(tiles, n, rest, rest, rest)


@cache
def cut_of(total: int, tiling: Tiling, length: int = 0, ratio: float = 1.0) -> Cut:
    """How to cut `total` elements, in rows of `length` if blocks of them share words.

    The cut is the one with the fewest parts of tiles, of those that are quick and have no tile of a single line: of
    slices of one row the older dialect has known issues (general/nki/nki_known_issues.rst, line 36). `ratio` is the
    time of the busiest engine over that of the DMAs: behind an engine that takes longer, more of their start is hidden.
    """
    candidates = list(_candidates(total, tiling, length))
    # A tensor of one element has no cut without a tile of a single line.
    fine = [c for c in candidates if all(part.lines > 1 for part in parts_of(total, c))] or candidates
    cycles = {c: _cycles(total, c, TILE_CYCLES / max(ratio, 1.0)) for c in fine}
    most = min(cycles.values()) * SLOWER
    return min((c for c in fine if cycles[c] <= most), key=lambda c: (_chunks(total, c), cycles[c], -c.width))


def _candidates(total: int, tiling: Tiling, length: int) -> Iterator[Cut]:
    """Columns that divide what is to be cut; if words are not shared, also some that do not."""
    if length:
        rest = length % BLOCK
        flat = not rest or total == length
        blocks = max((total - rest if flat else length) // BLOCK, 1)
        for n in _divisors(blocks, tiling.columns // BLOCK) if flat else range(1, tiling.columns // BLOCK + 1):
            if n <= blocks:
                yield Cut(n * BLOCK, BLOCK * max(_divisors(math.gcd(n, blocks), tiling.chunk // BLOCK)), length)
        return
    for columns in _divisors(total, tiling.columns):
        yield Cut(columns, max(_divisors(columns, tiling.chunk)))
    yield from (Cut(n, n) for n in ODD if n <= min(total, tiling.chunk))
    # Lengths without good divisors (a prime) are cut with a rest, which is one or two tiles more.
    for columns in range(tiling.chunk, min(total, tiling.columns) + 1, tiling.chunk):
        yield Cut(columns, tiling.chunk)


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def _chunks(total: int, cut: Cut) -> int:
    """The number of times that the instructions of a chunk are written, if loops over tiles are not unrolled."""
    return sum(part.strips * (part.columns // part.width) for part in parts_of(total, cut))


def _cycles(total: int, cut: Cut, start: float) -> float:
    """What an instruction with one cycle a column takes for all tiles, with what it and a tile take to start."""
    parts = parts_of(total, cut)
    return sum(p.tiles * p.strips * (start + p.columns + LEAST_CYCLES * p.columns // p.width) for p in parts)
