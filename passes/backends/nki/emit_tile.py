"""The text of the function that updates one tile of all tensors: loads, the instructions on its chunks, stores."""

from __future__ import annotations

from collections.abc import Iterator

from collage_neuron.passes.backends.nki.dialects import Nki, define
from collage_neuron.passes.backends.nki.docstring import MEASURES, Design
from collage_neuron.passes.backends.nki.ir import HALVES, Column, Value, View
from collage_neuron.passes.backends.nki.naming import names_of
from collage_neuron.passes.backends.nki.table_phases import TABLES
from collage_neuron.passes.backends.nki.tiling import tile_of, wide_tiles


def common(design: Design) -> list[str]:
    """The arguments that functions pass on: the tensors, and the tile of the scalar input."""
    return [*(a.key for a in design.arguments), *numbers(design)]


def numbers(design: Design) -> list[str]:
    """The tile of the scalar input, if there is one."""
    return ["numbers"] if design.plan.columns else []


def span(design: Design) -> list[str]:
    """The arguments that say which columns are updated, and how many an instruction takes."""
    if not design.plan.has_blocks:
        return ["width"]
    return ["first", "word", "columns", "width", "block", *["mark"] * bool(design.plan.program.measures)]


def elements(design: Design) -> str:
    """A tensor that has an element for each of the parameter."""
    return next(a.key for a in design.arguments if not a.block)


def update_tile(design: Design, d: Nki, suffix: str = "") -> list[str]:
    """The function that updates some lines of tensors of lines by columns."""
    blocks = design.plan.has_blocks
    words = next((a.key for a in design.arguments if a.block), "")
    columns = ", the columns from `first` on, and the words of their blocks" if blocks else ""
    totals = len(design.plan.program.measures)
    return [
        *define(f"_update_tile{suffix}", [*common(design), "line", *d.register, "rows", *span(design)]),
        f'    """Updates `rows` lines of all tensors{columns}."""',
        *d.index(blocks, elements(design), words),
        *(d.index_of_measures(blocks, totals) if totals else []),
        *_loads(design, d),
        *_chunks(design, d),
        *_stores(design, d),
    ]


def _loads(design: Design, d: Nki) -> Iterator[str]:
    names, loads, blocks = names_of(design.plan), design.plan.program.loads, design.plan.has_blocks
    for value in wide_tiles(design.plan):
        if value in loads:
            yield from d.load(names[value], value.name, value, blocks)
        else:
            yield from d.allocate(names[value], "rows", "columns // block" if value.block else "columns", value.dtype)
    if design.plan.program.measures:
        yield from d.allocate(f"{MEASURES}_out", "rows", "marks", "float32")


def _chunks(design: Design, d: Nki) -> Iterator[str]:
    """One loop over the columns of the tile for each phase."""
    phases = sorted({design.plan.program.phases[v] for v, _ in design.plan.steps})
    if design.plan.has_blocks:
        yield "    words = width // block"
    for phase in phases:
        tables = [v.op for v, _ in design.plan.phase(phase) if v.op in TABLES]
        if len(phases) > 1 and tables:
            yield f"    # the scalar engine holds the table of {tables[0]}"
        yield f"    for chunk in {d.range}(columns // width):"
        yield "        start = chunk * width"
        yield "        stop = start + width"
        yield from _chunk(design, d, phase)


def _chunk(design: Design, d: Nki, phase: int) -> Iterator[str]:
    """The instructions of a phase on the columns from `start` to `stop`."""
    plan = design.plan
    names, wide, steps = names_of(plan), wide_tiles(plan), plan.phase(phase)
    text: dict[Value | Column, str] = {c: f"numbers[0:rows, {k}:{k + 1}]" for k, c in enumerate(plan.columns)}
    places = {v: "[:, chunk * words : (chunk + 1) * words]" if v.block else "[:, start:stop]" for v in names}
    text |= {v: f"{names[v]}{places[v]}" if tile_of(v) in wide else names[v] for v in names}
    totals = plan.program.measures
    text |= {
        v: f"{MEASURES}_out[:, {_mark(k, len(totals))} : {_mark(k + 1, len(totals))}]" for k, v in enumerate(totals)
    }
    each = text | {v: f"{names[v]}{_in_block(v, tile_of(v) in wide)}" for v in names}
    if any(v.op in HALVES or isinstance(x, View) for v, i in steps for x in (None, *i.operands())):
        yield from d.chunk()
    made = {*wide, *totals}
    for value, instruction in steps:
        tile = tile_of(value)
        space = None if tile in made else "psum" if tile in plan.in_psum else "sbuf"
        made.add(tile)
        if instruction.by_block:
            yield from d.new_tile(text[tile], value, space) if space else []
            yield f"        for k in {d.range}(words):"
            yield from d.on_block(instruction, each[tile], value, each)
        else:
            yield from d.instruction(instruction, text[tile], value, space, text)


def _mark(k: int, totals: int) -> str:
    """The column of the k-th total of a chunk."""
    return f"chunk * {totals}{f' + {k}' if k else ''}"


def _in_block(value: Value, wide: bool) -> str:
    """The index of the elements of block k of a chunk, or of its word, in a tile: of the chunk, or of all of them."""
    if value.block:
        return "[:, chunk * words + k : chunk * words + k + 1]" if wide else "[:, k : k + 1]"
    return "[:, start + k * block : start + k * block + block]" if wide else "[:, k * block : k * block + block]"


def _stores(design: Design, d: Nki) -> Iterator[str]:
    names = names_of(design.plan)
    for key, value in design.plan.program.stores.items():
        yield from d.store(key, names[tile_of(value)], value, design.plan.has_blocks)
    if design.plan.program.measures:
        yield from d.store_measures(f"{MEASURES}_out")
