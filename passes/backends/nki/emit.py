"""Emission: writes a kernel as the text of a Python module.

One function updates one tile (rows by columns) of all tensors. A second function calls it for the tiles of tensors of
lines by columns: in a loop for the tiles of 128 lines, and once for the lines that are left. A third one takes flat
tensors as such lines (`tiling.py` says how many columns), and what is left of them as one or two tiles more. The
kernel itself loads the numbers of the step and calls the third function: once, or in `step_text` once per parameter.
There, in the newer dialect, the whole tiles of parameters of one size are first updated in loops over several of them
(`bodies.py` says why). In that dialect a kernel may run on the two cores of a logical one: each takes half of the lines
of every tensor, in loops of as many turns (`dialects.SHARES`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki.dialects import DIALECTS, SHARES, Nki, indented
from collage_neuron.passes.backends.nki.docstring import MEASURES, Design, docstring, names_of
from collage_neuron.passes.backends.nki.hardware import CORES, PARTITIONS
from collage_neuron.passes.backends.nki.ir import HALVES, Column, Value, View
from collage_neuron.passes.backends.nki.schedule import TABLES
from collage_neuron.passes.backends.nki.tiling import Cut, is_looped, tile_of, turns_of, whole_tiles, wide_tiles

WIDTH = 120
"""Columns of a line."""


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


def _of_loops(d: Nki, done: str = "done") -> list[str]:
    """What a function is told of the loops that a device runs."""
    return ["tiles", done] if d.loops else []


def call(function: str, *arguments: object) -> str:
    """A call, on one line."""
    return f"{function}({', '.join(map(str, arguments))})"


def define(name: str, parameters: Iterable[str], doc: str, *body: Iterable[str]) -> list[str]:
    """A function."""
    return [f"def {call(name, *parameters)}:", *indented(f'"""{doc}"""', *(line for part in body for line in part))]


def _tile(design: Design, d: Nki, suffix: str = "") -> list[str]:
    """The function that updates some lines of tensors of lines by columns."""
    blocks, totals, names = design.plan.has_blocks, len(design.plan.program.measures), names_of(design.plan)
    words = next((a.key for a in design.arguments if a.block), "")
    columns = ", the columns from `first` on, and the words of their blocks" if blocks else ""
    return define(
        f"_update_tile{suffix}",
        [*common(design), "line", *["at"] * d.loops, "rows", *span(design)],
        f"Updates `rows` lines of all tensors{columns}.",
        d.index(blocks, elements(design), words),
        [f"marks = columns // width * {totals}", *d.index_of_measures(blocks)] if totals else [],
        _loads(design, d),
        _chunks(design, d),
        (d.store(key, names[tile_of(v)], v, blocks) for key, v in design.plan.program.stores.items()),
        [d.store(MEASURES, f"{MEASURES}_out", None, blocks)] * bool(totals),
    )


def _loads(design: Design, d: Nki) -> Iterator[str]:
    names, loads, blocks = names_of(design.plan), design.plan.program.loads, design.plan.has_blocks
    for value in wide_tiles(design.plan):
        if value in loads:
            yield from d.load(names[value], value.name, value, blocks)
        else:
            yield d.allocate(names[value], "rows", "columns // block" if value.block else "columns", value.dtype)
    if design.plan.program.measures:
        yield d.allocate(f"{MEASURES}_out", "rows", "marks", "float32")


def _chunks(design: Design, d: Nki) -> Iterator[str]:
    """One loop over the columns of the tile for each phase."""
    phases = sorted({design.plan.program.phases[v] for v, _ in design.plan.steps})
    if design.plan.has_blocks:
        yield "words = width // block"
    for phase in phases:
        tables = [v.op for v, _ in design.plan.phase(phase) if v.op in TABLES]
        if len(phases) > 1 and tables:
            yield f"# the scalar engine holds the table of {tables[0]}"
        yield f"for chunk in {d.range}(columns // width):"
        yield from indented("start = chunk * width", "stop = start + width", *_chunk(design, d, phase))


def _chunk(design: Design, d: Nki, phase: int) -> Iterator[str]:
    """The instructions of a phase on the columns from `start` to `stop`."""
    plan = design.plan
    names, wide, steps = names_of(plan), wide_tiles(plan), plan.phase(phase)
    text: dict[Value | Column, str] = {c: f"numbers[0:rows, {k}:{k + 1}]" for k, c in enumerate(plan.columns)}
    places = {v: "[:, chunk * words : (chunk + 1) * words]" if v.block else "[:, start:stop]" for v in names}
    text |= {v: f"{names[v]}{places[v]}" if tile_of(v) in wide else names[v] for v in names}
    totals = plan.program.measures
    marks = [f"chunk * {len(totals)}{f' + {k}' if k else ''}" for k in range(len(totals) + 1)]
    text |= {v: f"{MEASURES}_out[:, {a} : {b}]" for v, (a, b) in zip(totals, pairwise(marks), strict=True)}
    each = text | {v: f"{names[v]}{_in_block(v, tile_of(v) in wide)}" for v in names}
    if any(v.op in HALVES or isinstance(x, View) for v, i in steps for x in (None, *i.operands())):
        yield from d.chunk()
    made = {*wide, *totals}  # all others are allocated by the first instruction that writes them
    for value, instruction in steps:
        tile = tile_of(value)
        space = None if tile in made else "psum" if tile in plan.in_psum else "sbuf"
        made.add(tile)
        if instruction.by_block:
            yield from [d.new_tile(text[tile], value, space)] if space else []
            yield f"for k in {d.range}(words):"
            yield from indented(*d.instruction(instruction, each[tile], value, None, each))
        else:
            yield from d.instruction(instruction, text[tile], value, space, text)


def _in_block(value: Value, wide: bool) -> str:
    """The index of the elements of block k of a chunk, or of its word, in a tile: of the chunk, or of all of them."""
    if value.block:
        return "[:, chunk * words + k : chunk * words + k + 1]" if wide else "[:, k : k + 1]"
    return "[:, start + k * block : start + k * block + block]" if wide else "[:, k * block : k * block + block]"


def text_of(design: Design) -> str:
    """The module of a kernel, as Python."""
    d = DIALECTS[design.dialect]
    return _module(docstring(design), [design], d, *_functions(design, d), _kernel(design, d))


BESIDE = 16
"""The most parameters that one loop updates."""


class Work(NamedTuple):
    """Tensors of so many elements that a kernel updates, and how they are cut: one parameter's part of a step."""

    kernel: Design
    total: int
    cut: Cut
    beside: int = 1
    """Parameters that one loop updates."""
    scalars: int = 0
    """The number of its scalar input."""

    def with_tiles(self, tiles: int) -> Work:
        """The same with so many tiles of each parameter in a turn."""
        cut = self.cut._replace(tiles=tiles)
        # A loop over several tensors has no tiles with words of blocks yet.
        whole = 0 if cut.length else whole_tiles(self.total, cut)
        return self._replace(cut=cut._replace(done=turns_of(whole, cut) > 0))


def step_text(name: str, works: Sequence[Work]) -> str:
    """The module of a kernel that updates the tensors of many parameters, as Python.

    Its arguments are the tensors of each part in order, then the scalar inputs; it returns the written ones, in order.
    """
    d = DIALECTS[works[0].kernel.dialect]
    doc = [f"One optimizer step of {len(works)} parameters as one kernel, made of these:", ""]
    numbered = {kernel: k for k, kernel in enumerate(dict.fromkeys(work.kernel for work in works))}
    for kernel, k in numbered.items():
        doc += [f"_update_{k}", "", *docstring(kernel), ""]
    parts = [part for kernel, k in numbered.items() for part in _functions(kernel, d, f"_{k}")]
    looped = {work.kernel for work in works if work.cut.done}
    parts += [_turn(kernel, f"_{k}") for kernel, k in numbered.items() if kernel in looped]
    return _module(doc[:-1], list(numbered), d, *parts, _step(name, works, numbered, d))


LINES = '''\
def _lines(tensor, total, start, lines, columns):
    """Elements of a tensor that has `total` of them, from `start` on, as lines of so many columns."""
    part = tensor
    if lines * columns < total:
        part = tensor.reshape((total,))[start : start + lines * columns]
    return part.reshape((lines, columns))'''


def _module(doc: Sequence[str], designs: Sequence[Design], d: Nki, *functions: Iterable[str]) -> str:
    blocks = any(design.plan.has_blocks for design in designs)
    constants = [f"PARTITIONS = {PARTITIONS}", *([f"BLOCK = {BLOCK}  # elements that share a word"] * blocks)]
    head = "\n".join([f'"""{doc[0]}', *doc[1:], '"""', "", *d.imports, "", *constants])
    made = ("\n".join(line for long in function for line in wrapped(long)) for function in functions)
    return "\n\n\n".join([head, LINES, *[SHARES] * d.loops, *made]) + "\n"


def wrapped(line: str) -> list[str]:
    """A line that ends with a call, or is the head of a function, as ruff formats it.

    That is on one line, with its arguments on one of their own, or with a line for each.
    """
    # Kernels that are kept for reading are files of the repository, whose format ruff checks.
    end = line.rfind(")")
    if len(line) <= WIDTH or not line.endswith((")", "):")):
        return [line]
    depth, edges = 0, [end]
    for i in range(end, 0, -1):
        depth += (line[i] in ")]") - (line[i] in "([")
        if depth == 0 or (depth == 1 and line[i] == ","):
            edges.append(i)
        if depth == 0:
            break
    arguments = [line[a + 1 : b].strip() for a, b in pairwise(reversed(edges))]
    margin = " " * (len(line) - len(line.lstrip()))
    inside = f"{margin}    {', '.join(arguments)}"
    lines = [inside] if len(inside) <= WIDTH else [f"{margin}    {argument}," for argument in arguments]
    return [line[: edges[-1] + 1], *lines, f"{margin}{line[end:]}"]


def _functions(design: Design, d: Nki, suffix: str = "") -> list[list[str]]:
    update = _update_rows if design.plan.has_blocks else _update_flat
    return [f(design, d, suffix) for f in (_tile, _update_lines, update)]


def _update_lines(design: Design, d: Nki, suffix: str = "") -> list[str]:
    def tile(*where: str) -> str:
        return call(f"_update_tile{suffix}", *common(design), *where, *span(design))

    return define(
        f"_update_lines{suffix}",
        [*common(design), *span(design), *_of_loops(d)],
        "Updates tensors of lines by columns: tiles of PARTITIONS lines, and what is left.",
        d.share(f"{elements(design)}.shape[0]"),
        d.loop(tile),
        # No tile has a single line, with whose slices the older dialect has known issues: 129 lines are 127 and 2.
        ["if lines - whole > PARTITIONS:"],
        indented(tile(*d.rest, "PARTITIONS - 1"), "whole = whole + PARTITIONS - 1"),
        ["if whole < lines:"],
        indented(tile(*d.rest, "lines - whole")),
    )


def _update_flat(design: Design, d: Nki, suffix: str = "") -> list[str]:
    totals = len(design.plan.program.measures)
    of_line = f"(columns // width) * {totals}"

    def update_lines(start: str, lines: str, columns: str, width: str, mark: str, marks: str) -> str:
        parts = _flat_parts(design, start, lines, columns, mark, marks)
        return "    " + call(f"_update_lines{suffix}", *parts, *numbers(design), width, *_of_loops(d))

    return define(
        f"_update{suffix}",
        [*common(design), "total", "columns", "width", *_of_loops(d)],
        "Updates the `total` elements of all tensors, cut into lines of so many columns.",
        [
            "assert columns % width == 0",
            "lines = total // columns",
            "if lines > 0:",
            update_lines("0", "lines", "columns", "width", "0", f"columns // width * {totals}"),
            # What fills no line: a column or more in each partition, and then fewer elements than partitions.
            "rest = total - lines * columns",
            "across = rest // PARTITIONS",
            "if across > 0:",
            update_lines("lines * columns", "PARTITIONS", "across", "across", f"lines * {of_line}", f"{totals}"),
            "last = rest - across * PARTITIONS",
            "if last > 0:",
            update_lines("total - last", "last", "1", "1", f"{MEASURES}.shape[0] - last * {totals}", f"{totals}"),
        ],
    )


def _flat_parts(design: Design, start: str, lines: str, columns: str, mark: str, marks: str) -> list[str]:
    """All tensors as lines of columns, from an element on; of the totals as many for each line."""
    of_elements, of_measures = ("total", start, lines, columns), (f"{MEASURES}.shape[0]", mark, lines, marks)
    return [call("_lines", a.key, *(of_measures if a.key == MEASURES else of_elements)) for a in design.arguments]


def _turn(design: Design, suffix: str) -> list[str]:
    """The function that updates some tiles of one of the tensors of a loop."""
    totals = len(design.plan.program.measures)
    parts = _flat_parts(design, "0", "lines", "columns", "0", f"columns // width * {totals}")
    where = [*numbers(design), "base + tile * PARTITIONS", "line", "PARTITIONS", "width"]
    return define(
        f"_turn{suffix}",
        [*common(design), "line", "total", "columns", "width", "tiles"],
        "Updates, in a turn of a loop over lines, as many tiles of all tensors.",
        ["lines = total // columns", "base = _first(lines)", "for tile in range(tiles):"],
        indented(call(f"_update_tile{suffix}", *parts, *where)),
    )


def _update_rows(design: Design, d: Nki, suffix: str = "") -> list[str]:
    """Blocks end with the rows of a parameter; unless that cuts one, elements and words are flat all the same."""
    totals = len(design.plan.program.measures)
    names = [f"{a.key}_part" for a in design.arguments]

    def update_lines(*where: str, mark: str = "0") -> str:
        marks = [mark] * bool(totals)
        return call(f"_update_lines{suffix}", *names, *numbers(design), *where, *marks, *_of_loops(d, "False"))

    def lines(start: str, n: str, columns: str, words: str, chunks: str, mark: str = "0") -> list[str]:
        of_words, of_elements = f"blocks, {start} // BLOCK, {n}, {words}", f"total, {start}, {n}, {columns}"
        of_measures = f"{MEASURES}.shape[0], {mark}, {n}, {chunks} * {totals}"
        where = (of_measures if a.key == MEASURES else of_words if a.block else of_elements for a in design.arguments)
        return [f"{a.key}_part = _lines({a.key}, {w})" for a, w in zip(design.arguments, where, strict=True)]

    def all_blocks(elements: str) -> list[str]:
        as_lines = lines("0", f"{elements} // columns", "columns", "columns // BLOCK", "columns // width")
        return [*as_lines, update_lines("0", "0", "columns", "width", "BLOCK")]

    rest = ("rest", "rest", "rest")
    return define(
        f"_update{suffix}",
        [*common(design), "total", "length", "columns", "width", *["tiles"] * d.loops],
        "Updates the `total` elements of all tensors, and the words of the blocks of their rows.",
        ["assert columns % width == 0 and width % BLOCK == 0"],
        ["whole = length // BLOCK * BLOCK", "rest = length - whole"],
        # No block is cut, so that elements and words both lie side by side, whatever the rows are.
        ["if rest == 0:"],
        indented("assert total % columns == 0", "blocks = total // BLOCK", *all_blocks("total")),
        # One row: its whole blocks are flat too; the shorter one is a tile of one line, as its word has one partition.
        ["if rest > 0 and total == length:"],
        indented("assert whole % columns == 0", "blocks = whole // BLOCK + 1", "if whole > 0:"),
        indented(*indented(*all_blocks("whole"))),
        indented(*lines("whole", "1", "rest", "1", "1", f"{MEASURES}.shape[0] - {totals}")),
        indented(update_lines("0", "0", *rest)),
        # Several rows that end with a shorter block: a line is a row, cut into strips of whole blocks, a narrower
        # strip, and the short block.
        ["if rest > 0 and total > length:"],
        indented("assert whole % width == 0", "blocks = total // length * (whole // BLOCK + 1)"),
        indented(*lines("0", "total // length", "length", "(whole // BLOCK + 1)", "(whole // width + 1)")),
        indented(f"for strip in {d.range}(whole // columns):"),
        indented(*indented(update_lines("strip * columns", "strip * (columns // BLOCK)", "columns", "width", "BLOCK",
                                        mark=f"strip * (columns // width) * {totals}"))),
        indented("over = whole % columns", "if over > 0:"),
        indented(*indented(update_lines("whole - over", "(whole - over) // BLOCK", "over", "width", "BLOCK",
                                        mark=f"(whole - over) // width * {totals}"))),
        indented(update_lines("whole", "whole // BLOCK", *rest, mark=f"whole // width * {totals}")),
    )  # fmt: skip


def _done(design: Design, d: Nki, done: bool) -> list[str]:
    """What `_update` is told of a loop over several tensors before it; tensors with words of blocks are in none."""
    return [str(done)] * (d.loops and not design.plan.has_blocks)


def _jitted(
    name: str, d: Nki, arguments: Sequence[tuple[str, bool]], columns: Mapping[str, int], draws: bool,
    cut: Sequence[str], body: Sequence[Sequence[str]],
) -> list[str]:  # fmt: skip
    """A kernel of tensors that it writes, or only reads, and of so many numbers for each suffix of a scalar input."""
    given = [*(d.parameter(*a) for a in arguments), *(f"scalars{suffix}" for suffix in columns), *["seed"] * draws]
    numbers = (d.load_numbers(count, suffix) for suffix, count in columns.items())
    doc = "Updates all elements of all tensors, in place."
    return ["@nki.jit", *define(name, [*given, *cut], doc, *numbers, d.seed() if draws else [], *body)]


def _kernel(design: Design, d: Nki) -> list[str]:
    columns = len(design.plan.columns)
    cut = ["total", *["length"] * design.plan.has_blocks, "columns", "width", *["tiles"] * d.loops]
    arguments = [(a.key, a.written) for a in design.arguments]
    returned = f"return {', '.join(key for key, written in arguments if written)}"
    body = [[call("_update", *common(design), *cut, *_done(design, d, False))], [returned]]
    return _jitted(design.name, d, arguments, {"": columns} if columns else {}, design.plan.draws, cut, body)


def _step(name: str, works: Sequence[Work], numbered: Mapping[Design, int], d: Nki) -> list[str]:
    arguments = [(f"{a.key}_{i}", a.written) for i, work in enumerate(works) for a in work.kernel.arguments]
    columns = {work.scalars: n for work in works if (n := len(work.kernel.plan.columns))}
    draws = any(work.kernel.plan.draws for work in works)
    returned = call("return ", *(key for key, written in arguments if written))
    body = [
        *(_loop(works, numbered, k, members) for k, members in enumerate(loops_of(works))),
        *(_part(work, numbered, i, d) for i, work in enumerate(works)),
    ]
    return _jitted(name, d, arguments, {f"_{j}": columns[j] for j in sorted(columns)}, draws, [], [*body, [returned]])


def loops_of(works: Sequence[Work]) -> list[list[int]]:
    """The parts of each loop over several parameters: of one kernel and one size, so many at most."""
    alike: dict[tuple[Design, int, Cut], list[int]] = {}
    for i, work in enumerate(works):
        if work.cut.done:
            alike.setdefault(work[:3], []).append(i)
    # As few loops as take all, with as many parameters in each as in the others, or one fewer.
    return [members[k::n] for members in alike.values() for n in [-(-len(members) // BESIDE)] for k in range(n)]


def _loop(works: Sequence[Work], numbered: Mapping[Design, int], k: int, members: Sequence[int]) -> list[str]:
    """A loop that updates whole tiles of several parameters in each turn."""
    kernel, total, cut, *_ = works[members[0]]
    where = ("line", total, cut.columns, cut.width, cut.tiles)
    return [
        f"looped_{k} = _looped({total // cut.columns}, {cut.tiles})",
        f"if looped_{k} > 0:",
        "",
        f"    def body_{k}(line):",
        *(f"        {call(f'_turn_{numbered[kernel]}', *_given(works[i], i), *where)}" for i in members),
        "",
        f"    nl.fori_loop(0, looped_{k}, body_{k}, step={cut.tiles} * PARTITIONS)",
    ]


def _part(work: Work, numbered: Mapping[Design, int], i: int, d: Nki) -> list[str]:
    """The call that updates the tensors of one parameter, or what a loop left of them."""
    cut = work.cut
    # One text runs on one core and on two: the call is left out only where neither leaves anything.
    if cut.done and all(is_looped(work.total, cut, cores) for cores in (1, CORES)):
        return []
    where = (*d.cut_arguments(cut, work.total), *_done(work.kernel, d, cut.done))
    return [call(f"_update_{numbered[work.kernel]}", *_given(work, i), *where)]


def _given(work: Work, i: int) -> list[str]:
    """The tensors of one parameter, and its numbers."""
    scalars = [f"numbers_{work.scalars}"] if work.kernel.plan.columns else []
    return [*(f"{a.key}_{i}" for a in work.kernel.arguments), *scalars]
