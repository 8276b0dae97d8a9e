"""Emission: a kernel as the text of a Python module.

One function updates a tile of all tensors, rows by columns, wherever it lies; the kernel calls it for the tiles of
N // 128 elements a partition, and once more for the last N % 128 elements, one in each partition.
"""

from __future__ import annotations

from collections.abc import Iterator

from collage_neuron.passes.nki.describe import Design, docstring
from collage_neuron.passes.nki.dialects import DIALECTS, Nki, call
from collage_neuron.passes.nki.engines import PARTITIONS
from collage_neuron.passes.nki.ir import Column, Value
from collage_neuron.passes.nki.names import names_of
from collage_neuron.passes.nki.tiling import tile_of, wide_tiles


def text_of(design: Design, dialect: str) -> str:
    """The module of a kernel in a dialect, as Python."""
    d = DIALECTS[dialect]
    parts = [_head(design, d), _update(design, d), _kernel(design, d)]
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(design: Design, d: Nki) -> list[str]:
    first, *more = docstring(design)
    return [
        f'"""{first}',
        *more,
        '"""',
        "",
        *d.imports,
        "",
        f"PARTITIONS = {PARTITIONS}",
        f"COLUMNS = {design.tiling.columns}  # of a DMA tile",
        f"CHUNK = {design.tiling.chunk}  # columns an instruction takes",
    ]


def _common(design: Design) -> list[str]:
    """What both functions hand on: the tensors, and the tile of the scalar input."""
    return [a.key for a in design.arguments] + (["numbers"] if design.plan.columns else [])


def _update(design: Design, d: Nki) -> list[str]:
    return [
        *_define("_update_tile", [*_common(design), "offset", "stride", "rows", "columns"]),
        '    """Updates the elements offset + stride * row + column of all tensors."""',
        *d.index(),
        *_loads(design, d),
        f"    for start in {d.range}(0, columns, CHUNK):",
        "        stop = min(start + CHUNK, columns)",
        *_chunk(design, d),
        *_stores(design, d),
    ]


def _loads(design: Design, d: Nki) -> Iterator[str]:
    names, loads = names_of(design.plan), design.plan.program.loads
    for value in wide_tiles(design.plan):
        if value in loads:
            yield from d.load(names[value], value.name, value.dtype)
        else:
            yield from d.allocate(names[value], "rows", "columns", value.dtype)


def _chunk(design: Design, d: Nki) -> Iterator[str]:
    """The instructions on the columns from `start` to `stop`."""
    plan = design.plan
    names, wide = names_of(plan), wide_tiles(plan)
    text: dict[Value | Column, str] = {c: f"numbers[0:rows, {k}:{k + 1}]" for k, c in enumerate(plan.columns)}
    text |= {v: f"{names[v]}[:, start:stop]" if tile_of(v) in wide else names[v] for v in names}
    if any(tile_of(v) not in wide for v, _ in plan.steps):
        yield "        width = stop - start"
    made = set(wide)
    for value, instruction in plan.steps:
        tile = tile_of(value)
        space = None if tile in made else "psum" if tile in plan.in_psum else "sbuf"
        made.add(tile)
        yield from d.instruction(instruction, text[tile], value, space, text)


def _stores(design: Design, d: Nki) -> Iterator[str]:
    names = names_of(design.plan)
    for key, value in design.plan.program.stores.items():
        yield from d.store(key, names[tile_of(value)])


def _kernel(design: Design, d: Nki) -> list[str]:
    columns = design.plan.columns
    parameters = [d.parameter(a.key, a.written) for a in design.arguments] + (["scalars"] if columns else [])

    def update(*where: str) -> list[str]:
        return call(8, "_update_tile", [("", x) for x in (*_common(design), *where)])

    return [
        "@nki.jit",
        *_define(design.name, parameters),
        '    """Updates all elements of all tensors, in place."""',
        f"    total = {design.arguments[0].key}.shape[0]",
        "    stride = total // PARTITIONS",
        *(d.load_numbers(len(columns)) if columns else []),
        f"    for offset in {d.range}(0, stride, COLUMNS):",
        *update("offset", "stride", "PARTITIONS", "min(COLUMNS, stride - offset)"),
        "    rest = total - PARTITIONS * stride",
        "    if rest > 0:",
        *update("PARTITIONS * stride", "1", "rest", "1"),
        f"    return {', '.join(a.key for a in design.arguments if a.written)}",
    ]


def _define(name: str, parameters: list[str]) -> list[str]:
    return call(0, f"def {name}", [("", p) for p in parameters], after=":")
