"""Emission: writes a kernel as the text of a Python module.

One function updates one tile (rows by columns) of all tensors. A second function calls it for all tiles of the
N // 128 elements per partition, and once more for the last N % 128 elements, one in each partition. The kernel itself
loads the numbers of the step and calls the second function: once, or in `step_text` once per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    head = _head(docstring(design), [*d.imports, "", f"PARTITIONS = {PARTITIONS}", *_sizes(design)])
    return _module(head, _update_tile(design, d), _update(design, d), _kernel(design, d))


class Call(NamedTuple):
    """One parameter's part of a step: the index of its design and of its scalar input."""

    design: int
    scalars: int


def step_text(name: str, designs: Sequence[Design], calls: Sequence[Call], dialect: str) -> str:
    """The module of a kernel that updates the tensors of many parameters, as Python.

    Its arguments are the tensors of each call in order, then the scalar inputs; it returns the written ones, in order.
    """
    d = DIALECTS[dialect]
    doc = [f"One optimizer step of {len(calls)} parameters as one kernel, made of these:", ""]
    for k, design in enumerate(designs):
        doc += [f"_update_{k}", "", *docstring(design), ""]
    head = _head(doc[:-1], [*d.imports, "", f"PARTITIONS = {PARTITIONS}"])
    parts = [f(design, d, f"_{k}") for k, design in enumerate(designs) for f in (_sized, _update_tile, _update)]
    return _module(head, *parts, _step(name, designs, calls, d))


def _module(*parts: list[str]) -> str:
    return "\n\n\n".join("\n".join(part) for part in parts) + "\n"


def _head(doc: list[str], lines: list[str]) -> list[str]:
    first, *more = doc
    return [f'"""{first}', *more, '"""', "", *lines]


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
    return [
        *_define(f"_update_tile{suffix}", [*_common(design), "offset", "stride", "rows", "columns"]),
        '    """Updates the elements offset + stride * row + column of all tensors."""',
        *d.index(),
        *_loads(design, d),
        *_chunks(design, d, suffix),
        *_stores(design, d),
    ]


def _loads(design: Design, d: Nki) -> Iterator[str]:
    names, loads = names_of(design.plan), design.plan.program.loads
    for value in wide_tiles(design.plan):
        if value in loads:
            yield from d.load(names[value], value.name, value.dtype)
        else:
            yield from d.allocate(names[value], "rows", "columns", value.dtype)


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
    text |= {v: f"{names[v]}[:, start:stop]" if tile_of(v) in wide else names[v] for v in names}
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
        yield from d.instruction(instruction, text[tile], value, space, text)


def _stores(design: Design, d: Nki) -> Iterator[str]:
    names = names_of(design.plan)
    for key, value in design.plan.program.stores.items():
        yield from d.store(key, names[tile_of(value)])


def _update(design: Design, d: Nki, suffix: str = "") -> list[str]:
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


def _kernel(design: Design, d: Nki) -> list[str]:
    columns = len(design.plan.columns)
    return [
        "@nki.jit",
        *_define(design.name, [d.parameter(a.key, a.written) for a in design.arguments] + ["scalars"] * bool(columns)),
        '    """Updates all elements of all tensors, in place."""',
        *(d.load_numbers(columns) if columns else []),
        *call(4, "_update", [("", x) for x in _common(design)]),
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
    return call(4, f"_update_{c.design}", [*(("", f"{a.key}_{i}") for a in design.arguments), *numbers])


def _define(name: str, parameters: list[str]) -> list[str]:
    return call(0, f"def {name}", [("", p) for p in parameters], after=":")
