"""Emission: writes a kernel as the text of a Python module.

One function updates one tile (rows by columns) of all tensors. A second function calls it for all tiles of the
N // 128 elements per partition, and once more for the last N % 128 elements, one in each partition. The kernel itself
loads the numbers of the step and calls the second function: once, or in `step_text` once per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from collage_neuron.numerics.block_words import BLOCK
from collage_neuron.passes.backends.nki.dialects import DIALECTS, Nki, call
from collage_neuron.passes.backends.nki.docstring import Design, docstring
from collage_neuron.passes.backends.nki.hardware import PARTITIONS
from collage_neuron.passes.backends.nki.ir import HALVES, Column, Value, View
from collage_neuron.passes.backends.nki.naming import names_of
from collage_neuron.passes.backends.nki.table_phases import TABLES
from collage_neuron.passes.backends.nki.tiling import tile_of, wide_tiles


def text_of(design: Design, dialect: str) -> str:
    """The module of a kernel in a dialect, as Python."""
    d = DIALECTS[dialect]
    head = _head(docstring(design), [*d.imports, "", *_constants([design]), *_sizes(design)])
    return _module(head, _update_tile(design, d), _update(design, d), _kernel(design, d))


class Call(NamedTuple):
    """One parameter's part of a step: the index of its design and of its scalar input, and the length of its rows."""

    design: int
    scalars: int
    length: int = 0


def step_text(name: str, designs: Sequence[Design], calls: Sequence[Call], dialect: str) -> str:
    """The module of a kernel that updates the tensors of many parameters, as Python.

    Its arguments are the tensors of each call in order, then the scalar inputs; it returns the written ones, in order.
    """
    d = DIALECTS[dialect]
    doc = [f"One optimizer step of {len(calls)} parameters as one kernel, made of these:", ""]
    for k, design in enumerate(designs):
        doc += [f"_update_{k}", "", *docstring(design), ""]
    head = _head(doc[:-1], [*d.imports, "", *_constants(designs)])
    parts = [f(design, d, f"_{k}") for k, design in enumerate(designs) for f in (_sized, _update_tile, _update)]
    return _module(head, *parts, _step(name, designs, calls, d))


def _module(*parts: list[str]) -> str:
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(doc: list[str], lines: list[str]) -> list[str]:
    first, *more = doc
    return [f'"""{first}', *more, '"""', "", *lines]


def _constants(designs: Sequence[Design]) -> list[str]:
    blocks = any(design.plan.has_blocks for design in designs)
    return [f"PARTITIONS = {PARTITIONS}", *([f"BLOCK = {BLOCK}  # elements that share a word"] if blocks else [])]


def _sizes(design: Design, suffix: str = "") -> list[str]:
    return [
        f"COLUMNS{suffix} = {design.tiling.columns}  # of a DMA tile",
        f"CHUNK{suffix} = {design.tiling.chunk}  # columns an instruction takes",
    ]


def _sized(design: Design, d: Nki, suffix: str) -> list[str]:
    return _sizes(design, suffix)


def _common(design: Design) -> list[str]:
    """The arguments that both functions pass on: the tensors, and the tile of the scalar input."""
    return [a.key for a in design.arguments] + (["numbers"] if design.plan.columns else [])


def _update_tile(design: Design, d: Nki, suffix: str = "") -> list[str]:
    blocks = design.plan.has_blocks
    where = ["offset", "stride", "rows", "columns", *(["block", "first", "blocks"] if blocks else [])]
    words = ", and the words first + blocks * row + column // block" if blocks else ""
    return [
        *_define(f"_update_tile{suffix}", [*_common(design), *where]),
        f'    """Updates the elements offset + stride * row + column of all tensors{words}."""',
        *d.index(),
        *(d.index(block=True) if blocks else []),
        *_loads(design, d),
        *_chunks(design, d, suffix),
        *_stores(design, d),
    ]


def _loads(design: Design, d: Nki) -> Iterator[str]:
    names, loads = names_of(design.plan), design.plan.program.loads
    for value in wide_tiles(design.plan):
        if value in loads:
            yield from d.load(names[value], value.name, value)
        else:
            yield from d.allocate(names[value], "rows", "columns // block" if value.block else "columns", value.dtype)


def _chunks(design: Design, d: Nki, suffix: str) -> Iterator[str]:
    """One loop over the columns of the tile for each phase."""
    phases = sorted({design.plan.program.phases[v] for v, _ in design.plan.steps})
    for phase in phases:
        tables = [v.op for v, _ in design.plan.phase(phase) if v.op in TABLES]
        if len(phases) > 1 and tables:
            yield f"    # the scalar engine holds the table of {tables[0]}"
        yield f"    for start in {d.range}(0, columns, CHUNK{suffix}):"
        yield f"        stop = min(start + CHUNK{suffix}, columns)"
        yield from _chunk(design, d, phase)


def _chunk(design: Design, d: Nki, phase: int) -> Iterator[str]:
    """The instructions of a phase on the columns from `start` to `stop`."""
    plan = design.plan
    names, wide, steps = names_of(plan), wide_tiles(plan), plan.phase(phase)
    text: dict[Value | Column, str] = {c: f"numbers[0:rows, {k}:{k + 1}]" for k, c in enumerate(plan.columns)}
    places = {v: "[:, start // block : stop // block]" if v.block else "[:, start:stop]" for v in names}
    text |= {v: f"{names[v]}{places[v]}" if tile_of(v) in wide else names[v] for v in names}
    each = text | {v: f"{names[v]}{_in_block(v, tile_of(v) in wide)}" for v in names}
    halves = any(v.op in HALVES or isinstance(x, View) for v, i in steps for x in (None, *i.operands()))
    if halves or any(tile_of(v) not in wide for v, _ in steps):
        yield "        width = stop - start"
    if halves:
        yield from d.chunk()
    made = set(wide)
    for value, instruction in steps:
        tile = tile_of(value)
        space = None if tile in made else "psum" if tile in plan.in_psum else "sbuf"
        made.add(tile)
        if instruction.by_block:
            yield from d.new_tile(text[tile], value, space) if space else []
            yield f"        for at in {d.range}(start, stop, block):"
            yield from d.on_block(instruction, each[tile], value, each)
        else:
            yield from d.instruction(instruction, text[tile], value, space, text)


def _in_block(value: Value, wide: bool) -> str:
    """The index of the elements of a block, or of its word, in a tile: one of a chunk begins where the chunk does."""
    at = "at" if wide else "(at - start)" if value.block else "at - start"
    return f"[:, {at} // block : {at} // block + 1]" if value.block else f"[:, {at} : {at} + block]"


def _stores(design: Design, d: Nki) -> Iterator[str]:
    names = names_of(design.plan)
    for key, value in design.plan.program.stores.items():
        yield from d.store(key, names[tile_of(value)], value)


def _update(design: Design, d: Nki, suffix: str = "") -> list[str]:
    return _update_rows(design, d, suffix) if design.plan.has_blocks else _update_flat(design, d, suffix)


def _update_flat(design: Design, d: Nki, suffix: str) -> list[str]:
    def update_tile(*where: str) -> list[str]:
        return call(8, f"_update_tile{suffix}", [("", x) for x in (*_common(design), *where)])

    return [
        *_define(f"_update{suffix}", _common(design)),
        '    """Updates all elements of all tensors."""',
        f"    total = {design.arguments[0].key}.shape[0]",
        "    stride = total // PARTITIONS",
        f"    for offset in {d.range}(0, stride, COLUMNS{suffix}):",
        *update_tile("offset", "stride", "PARTITIONS", f"min(COLUMNS{suffix}, stride - offset)"),
        "    rest = total - PARTITIONS * stride",
        "    if rest > 0:",
        *update_tile("PARTITIONS * stride", "1", "rest", "1"),
    ]


def _update_rows(design: Design, d: Nki, suffix: str) -> list[str]:
    """Blocks end with the rows of a parameter; unless that cuts one, elements and words are flat all the same."""

    def update_tile(indent: int, *where: str) -> list[str]:
        return call(indent, f"_update_tile{suffix}", [("", x) for x in (*_common(design), *where)])

    total = next(a.key for a in design.arguments if not a.block)
    return [
        *_define(f"_update{suffix}", [*_common(design), "length"]),
        '    """Updates all elements of all tensors, and the words of the blocks of their rows."""',
        f"    total = {total}.shape[0]",
        "    whole = length // BLOCK * BLOCK",
        "    if whole == length:",
        "        stride = total // (BLOCK * PARTITIONS) * BLOCK",
        f"        for offset in {d.range}(0, stride, COLUMNS{suffix}):",
        f"            columns = min(COLUMNS{suffix}, stride - offset)",
        *update_tile(
            12, "offset", "stride", "PARTITIONS", "columns", "BLOCK", "offset // BLOCK", "stride // BLOCK"
        ),
        "        done = PARTITIONS * stride",
        "        if done < total:",
        *update_tile(
            12, "done", "BLOCK", "(total - done) // BLOCK", "BLOCK", "BLOCK", "done // BLOCK", "1"
        ),
        "    else:",
        "        rest = length - whole",
        "        blocks = whole // BLOCK + 1",
        "        lines = total // length",
        f"        for line in {d.range}(0, lines, PARTITIONS):",
        "            rows = min(PARTITIONS, lines - line)",
        f"            for offset in {d.range}(0, whole, COLUMNS{suffix}):",
        f"                columns = min(COLUMNS{suffix}, whole - offset)",
        *update_tile(
            16, "line * length + offset", "length", "rows", "columns", "BLOCK",
            "line * blocks + offset // BLOCK", "blocks",
        ),
        *update_tile(
            12, "line * length + whole", "length", "rows", "rest", "rest", "line * blocks + blocks - 1", "blocks"
        ),
    ]  # fmt: skip


def _kernel(design: Design, d: Nki) -> list[str]:
    columns, length = len(design.plan.columns), ["length"] * design.plan.has_blocks
    return [
        "@nki.jit",
        *_define(
            design.name,
            [d.parameter(a.key, a.written) for a in design.arguments] + ["scalars"] * bool(columns) + length,
        ),
        '    """Updates all elements of all tensors, in place."""',
        *(d.load_numbers(columns) if columns else []),
        *call(4, "_update", [("", x) for x in (*_common(design), *length)]),
        f"    return {', '.join(a.key for a in design.arguments if a.written)}",
    ]


def _step(name: str, designs: Sequence[Design], calls: Sequence[Call], d: Nki) -> list[str]:
    arguments = [(f"{a.key}_{i}", a.written) for i, c in enumerate(calls) for a in designs[c.design].arguments]
    columns = {c.scalars: n for c in calls if (n := len(designs[c.design].plan.columns))}
    parameters = [d.parameter(*a) for a in arguments] + [f"scalars_{j}" for j in sorted(columns)]
    return [
        "@nki.jit",
        *_define(name, parameters),
        '    """Updates all elements of all tensors, in place."""',
        *(line for j in sorted(columns) for line in d.load_numbers(columns[j], f"_{j}")),
        *(line for i, c in enumerate(calls) for line in _part(designs[c.design], c, i)),
        *call(4, "return ", [("", key) for key, written in arguments if written]),
    ]


def _part(design: Design, c: Call, i: int) -> list[str]:
    """The call that updates the tensors of one parameter."""
    numbers = [("", f"numbers_{c.scalars}")] if design.plan.columns else []
    length = [("", str(c.length))] if design.plan.has_blocks else []
    return call(4, f"_update_{c.design}", [*(("", f"{a.key}_{i}") for a in design.arguments), *numbers, *length])


def _define(name: str, parameters: list[str]) -> list[str]:
    return call(0, f"def {name}", [("", p) for p in parameters], after=":")
