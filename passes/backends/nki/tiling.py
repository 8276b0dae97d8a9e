"""Tiling: chooses the columns of a DMA and of an instruction so that two buffers of each tile fit on chip.

A DMA tile is wide, for bandwidth: 4 KiB per partition or more saturate the DMA engines. Instructions process it in
chunks, so that intermediate values take little memory, and so that a PSUM tile is one bank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from collage_neuron.numerics.block_words import BLOCK
from collage_neuron.passes.backends.nki.hardware import PSUM_BANK, Generation
from collage_neuron.passes.backends.nki.ir import IN_PLACE, Value, itemsize
from collage_neuron.passes.backends.nki.schedule import Plan

IN_FLIGHT = 2
"""Buffers of each tile: one is transferred while the other is computed."""

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


def chunk_tiles(plan: Plan) -> list[Value]:
    """The tiles as wide as a chunk: all others."""
    made = {*wide_tiles(plan), *plan.program.measures}
    return list(dict.fromkeys(tile_of(v) for v, _ in plan.steps if tile_of(v) not in made))


def bytes_of(tiles: Iterable[Value], columns: int) -> int:
    """Bytes per partition of tiles for so many columns."""
    sizes = ((DRAWN if v.op == "draw" else itemsize(v.dtype), v) for v in tiles)
    return sum(size * (1 if v.chunk else columns // BLOCK if v.block else columns) for size, v in sizes)


def tiling_of(plan: Plan, g: Generation) -> Tiling:
    """The widest tiles that fit.

    Raises:
        OutOfMemory: not even the narrowest ones fit.
    """
    wide, between = wide_tiles(plan), [v for v in chunk_tiles(plan) if v not in plan.in_psum]
    totals = len(plan.program.measures)
    most = PSUM_BANK // itemsize("float32") if plan.in_psum else SUMMED if totals else max(CHUNKS)
    for columns in COLUMNS:
        for chunk in (c for c in CHUNKS if c <= min(most, columns)):
            tiles = bytes_of(wide, columns) + bytes_of(between, chunk) + 4 * totals * (columns // chunk)
            sbuf = IN_FLIGHT * tiles + 4 * len(plan.columns)
            if sbuf <= g.sbuf:
                return Tiling(columns, chunk, sbuf)
    raise OutOfMemory(
        f"an update of {len(plan.steps)} instructions does not fit into {g.sbuf >> 10} KiB a partition of {g.target}; "
        "use backend='xla'"
    )
