"""The two dialects of NKI: how each writes the same instructions, allocations and loops as text.

`nki`: `import nki`, versions 0.6 and 0.7, in the subset that both the parser of 0.6 and the tracer of 0.7 accept.
`beta1`: `neuronxcc.nki`, which the last Neuron SDKs (2.27 to 2.29) that support training on trn1 carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collage_neuron.passes.backends.nki.docstring import number
from collage_neuron.passes.backends.nki.ir import HALVES, Column, Instruction, Spread, Value, View
from collage_neuron.passes.backends.nki.tiling import Cut

Arguments = list[tuple[str, str]]

UpdateTile = Callable[..., list[str]]
"""Writes a call of `_update_tile`, with an indentation and with where the tile is."""

TAKES_ENGINE = frozenset({"tensor_tensor", "tensor_scalar", "tensor_copy", "memset", "rng"})
"""Instructions that more than one engine can run, and that name the engine."""


def call(indent: int, function: str, arguments: Arguments, before: str = "", after: str = "") -> list[str]:
    """A call, formatted as ruff would: on one line, on three, or with one line per argument."""
    head, pad, items = (
        f"{' ' * indent}{before}{function}(",
        " " * indent,
        [f"{k}={v}" if k else v for k, v in arguments],
    )
    if len(line := f"{head}{', '.join(items)}){after}") <= 120:
        return [line]
    if len(line := f"{pad}    {', '.join(items)}") <= 120:
        return [head, line, f"{pad}){after}"]
    return [head, *(f"{pad}    {item}," for item in items), f"{pad}){after}"]


def define(name: str, parameters: Sequence[str]) -> list[str]:
    """The head of a function."""
    return call(0, f"def {name}", [("", p) for p in parameters], after=":")


SHARES = (
    [
        "def _first(lines):",
        '    """The first line of this core: all take as many, and the last one also what is left."""',
        "    return lines // nl.num_programs() * nl.program_id(0)",
    ],
    [
        "def _whole(lines):",
        '    """The lines in whole tiles of each core: as many on all."""',
        "    share = lines // nl.num_programs()",
        "    whole = share // PARTITIONS * PARTITIONS",
        "    if share > 1 and share - whole == 1:",
        "        whole = whole - PARTITIONS",
        "    return whole",
    ],
    [
        "def _looped(lines, tiles):",
        '    """Of these, the lines that a loop updates, so many tiles in a turn: none, if it had one turn."""',
        "    turn = tiles * PARTITIONS",
        "    looped = _whole(lines) // turn * turn",
        "    if looped == turn:",
        "        looped = 0",
        "    return looped",
    ],
)
"""What each core of a logical one does: the newer dialect. With one core it does all.

Cores run one text, in which loops that the device runs have as many turns on each: others are undefined (NKI
documentation, get-started/about/lnc.rst). No core reads or writes a line of another one.
"""


class Nki:
    """The current dialect: the destination is an argument, HBM is addressed by access patterns."""

    name = "nki"
    imports: tuple[str, ...] = ("import nki", "import nki.isa as nisa", "import nki.language as nl")
    range = "range"
    """The loop over the parts of a tile."""
    engine = "nisa.engine.{}"
    register: tuple[str, ...] = ("at",)
    """What `_update_tile` is told of where a tile is, beside the line it begins at."""
    bodies: tuple[str, ...] = ("tiles",)
    """What a kernel is told of its loops: the tiles in a turn."""
    done: tuple[str, ...] = ("done",)
    """What a function is told of a loop over several tensors before it: True if that has updated the whole tiles."""
    loops = True
    """True if loops are run by the device, one of several tensors too."""
    helpers: Sequence[list[str]] = SHARES
    """Functions of a module that say what each core does."""

    def cut_arguments(self, cut: Cut, total: int) -> tuple[int, ...]:
        """The last arguments of a kernel: how tensors of so many elements are cut, and what is known of its loops."""
        return (*cut.arguments(total), *([cut.tiles] if self.loops else []))

    def parameter(self, name: str, written: bool) -> str:
        """A parameter of the kernel, a tensor in HBM."""
        return name

    def allocate(self, name: str, rows: str, columns: str, dtype: str, space: str = "sbuf") -> list[str]:
        """A tile."""
        arguments = [("", f"({rows}, {columns})"), ("dtype", f"nl.{dtype}"), ("buffer", f"nl.{space}")]
        return call(4, "nl.ndarray", arguments, f"{name} = ")

    def index(self, blocks: bool, first: str, words: str) -> list[str]:
        """The text that addresses a tile of HBM tensors, whose first one is `first`, and of the words of its blocks."""
        if not blocks:
            return [f"    columns = {first}.shape[1]", "    pattern = [[columns, rows], [1, columns]]"]
        return [
            f"    length, blocks = {first}.shape[1], {words}.shape[1]",
            "    pattern = [[length, rows], [1, columns]]",
            "    pattern_of_words = [[blocks, rows], [1, columns // block]]",
        ]

    def index_of_measures(self, blocks: bool, totals: int) -> list[str]:
        """The text that addresses the totals of a tile in HBM: so many for each of its chunks, in every line."""
        place = "line * measures.shape[1] + mark" if blocks else "line * measures.shape[1]"
        return [
            f"    marks = columns // width * {totals}",
            "    pattern_of_measures = [[measures.shape[1], rows], [1, marks]]",
            f"    offset_of_measures = {place}",
        ]

    def store_measures(self, name: str) -> list[str]:
        """Stores the totals of a tile to HBM."""
        place = "pattern=pattern_of_measures, offset=offset_of_measures, scalar_offset=at, indirect_dim=0"
        return call(4, "nisa.dma_copy", [("dst", f"measures.ap({place})"), ("src", name)])

    def place(self, key: str, value: Value, blocks: bool) -> str:
        """What `index` addresses of a tensor in HBM."""
        pattern, offset = "pattern", "line * length + first" if blocks else "line * columns"
        if value.block:
            pattern, offset = "pattern_of_words", "line * blocks + word"
        return f"{key}.ap(pattern={pattern}, offset={offset}, scalar_offset=at, indirect_dim=0)"

    def load(self, name: str, key: str, value: Value, blocks: bool) -> list[str]:
        """Loads a tile from HBM."""
        made = self.allocate(name, "rows", "columns // block" if value.block else "columns", value.dtype)
        return made + call(4, "nisa.dma_copy", [("dst", name), ("src", self.place(key, value, blocks))])

    def store(self, key: str, name: str, value: Value, blocks: bool) -> list[str]:
        """Stores a tile to HBM."""
        return call(4, "nisa.dma_copy", [("dst", self.place(key, value, blocks)), ("src", name)])

    def share(self, lines: str) -> list[str]:
        """The lines of this core: from `base` on so many, of which `whole` are in whole tiles."""
        return [
            f"    base = _first({lines})",
            f"    lines = {lines} // nl.num_programs()",
            "    if nl.program_id(0) == nl.num_programs() - 1:",
            f"        lines = {lines} - base",
            f"    whole = _whole({lines})",
            f"    looped = _looped({lines}, tiles)",
        ]

    def loop(self, update_tile: UpdateTile) -> list[str]:
        """The tiles of PARTITIONS lines: a loop that the device runs, several in a turn, and copies of what is left."""
        return [
            "    if looped > 0 and not done:",
            "",
            "        def body(line):",
            "            for tile in range(tiles):",
            *update_tile(16, "base + tile * PARTITIONS", "line", "PARTITIONS"),
            "",
            "        nl.fori_loop(0, looped, body, step=tiles * PARTITIONS)",
            "    for line in range(looped, whole, PARTITIONS):",
            *update_tile(8, "base + line", "None", "PARTITIONS"),
        ]

    def tile_at(self, update_tile: UpdateTile, rows: str) -> list[str]:
        """A tile of so many lines, from line `whole` on."""
        return update_tile(8, "base + whole", "None", rows)

    def remainder(self, update_tile: UpdateTile) -> list[str]:
        """The tile of the lines that are left."""
        return self.tile_at(update_tile, "lines - whole")

    def load_numbers(self, count: int, suffix: str = "") -> list[str]:
        """Loads the scalar input into a tile."""
        tile = self.allocate(f"numbers{suffix}", "PARTITIONS", str(count), "float32")
        return [*tile, f"    nisa.dma_copy(dst=numbers{suffix}, src=scalars{suffix})"]

    def instruction(
        self, i: Instruction, dst: str, value: Value, space: str | None, text: Mapping[Any, str]
    ) -> list[str]:
        """An instruction; `space` is the memory of its new tile, or None if its tile exists already."""
        lines = self.new_tile(dst, value, space) if space else []
        dst = self.view(dst, HALVES[value.op]) if value.op in HALVES else _bits(dst, i)
        return lines + call(8, f"nisa.{i.kind}", [("dst", dst), *self.arguments(i, text)])

    def new_tile(self, name: str, value: Value, space: str) -> list[str]:
        """A tile as wide as a chunk."""
        columns = "1" if value.chunk else "width // block" if value.block else "width"
        made = self.allocate(name, "rows", columns, value.dtype, space)
        return [" " * 4 + line for line in made]

    def on_block(self, i: Instruction, dst: str, value: Value, text: Mapping[Any, str]) -> list[str]:
        """An instruction on the elements of one block, which writes a part of a tile that exists."""
        return call(12, f"nisa.{i.kind}", [("dst", dst), *self.arguments(i, text)])

    def chunk(self) -> list[str]:
        """The text that addresses halves of the elements of a tile, at the start of a chunk that does."""
        return []

    def view(self, tile: str, half: int | None, dtype: str = "int16") -> str:
        """A tile as int16: all of its elements, or one half of each."""
        return f"{tile}.view(nl.{dtype})" + ("" if half is None else f"[:, {half}::2]")

    def seed(self) -> list[str]:
        """Seeds the generator of the vector engine: each core has one, and a seed for it."""
        return [
            "    core = nl.program_id(0)",
            "    seed_in = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)",
            "    nisa.dma_copy(dst=seed_in, src=seed[0:1, core : core + 1])",
            "    nisa.set_rng_seed(src_seeds=seed_in)",
        ]

    def arguments(self, i: Instruction, text: Mapping[Any, str]) -> Arguments:
        """The arguments of an instruction, except its destination."""
        arguments = []
        for name, x in i.fields:
            if isinstance(x, View):
                arguments.append((name, self.view(text[x.tile], x.half, x.dtype)))
            elif isinstance(x, Spread):
                arguments.append((name, text[x.tile]))
            elif isinstance(x, (Value, Column)):
                arguments.append((name, _bits(text[x], i)))
            else:
                arguments.append((name, f"nl.{x}" if isinstance(x, str) else "True" if x is True else number(x)))
        if i.kind == "tensor_reduce":
            arguments.append(("axis", "1"))
        return [*arguments, ("engine", self.engine.format(i.engine))] if i.kind in TAKES_ENGINE else arguments


class Beta1(Nki):
    """The older dialect: instructions return tiles, HBM is addressed by index expressions."""

    name = "beta1"
    imports = (
        "import neuronxcc.nki.isa as nisa",
        "import neuronxcc.nki.language as nl",
        "import neuronxcc.nki.typing as nt",
        "from neuronxcc import nki",
    )
    range = "nl.affine_range"
    engine = "nisa.{}_engine"
    register = ()
    bodies = ()
    done = ()
    loops = False
    helpers = ()

    def parameter(self, name: str, written: bool) -> str:
        return f"{name}: nt.mutable_tensor" if written else name

    def allocate(self, name: str, rows: str, columns: str, dtype: str, space: str = "sbuf") -> list[str]:
        arguments = [("", f"(nl.par_dim({rows}), {columns})"), ("dtype", f"nl.{dtype}"), ("buffer", f"nl.{space}")]
        return call(4, "nl.ndarray", arguments, f"{name} = ")

    def index(self, blocks: bool, first: str, words: str) -> list[str]:
        if not blocks:
            columns = [f"    columns = {first}.shape[1]"]
            return [*columns, "    at_line, at_column = nl.arange(rows)[:, None] + line, nl.arange(columns)[None, :]"]
        return [
            "    at_line, at_column = nl.arange(rows)[:, None] + line, nl.arange(columns)[None, :] + first",
            "    at_word = nl.arange(columns // block)[None, :] + word",
        ]

    def index_of_measures(self, blocks: bool, totals: int) -> list[str]:
        return [
            f"    marks = columns // width * {totals}",
            f"    at_mark = nl.arange(marks)[None, :]{' + mark' if blocks else ''}",
        ]

    def store_measures(self, name: str) -> list[str]:
        return [f"    nl.store(measures[at_line, at_mark], value={name})"]

    def place(self, key: str, value: Value, blocks: bool) -> str:
        return f"{key}[at_line, {'at_word' if value.block else 'at_column'}]"

    def load(self, name: str, key: str, value: Value, blocks: bool) -> list[str]:
        return [f"    {name} = nl.load({self.place(key, value, blocks)})"]

    def store(self, key: str, name: str, value: Value, blocks: bool) -> list[str]:
        return [f"    nl.store({self.place(key, value, blocks)}, value={name})"]

    def share(self, lines: str) -> list[str]:
        return [
            f"    lines = {lines}",
            "    whole = lines // PARTITIONS * PARTITIONS",
            "    if lines > 1 and lines - whole == 1:",
            "        whole = whole - PARTITIONS",
        ]

    def loop(self, update_tile: UpdateTile) -> list[str]:
        return [
            "    if whole > 0:",
            "        for tile in nl.affine_range(whole // PARTITIONS):",
            *update_tile(12, "tile * PARTITIONS", "PARTITIONS"),
        ]

    def tile_at(self, update_tile: UpdateTile, rows: str) -> list[str]:
        return update_tile(8, "whole", rows)

    def chunk(self) -> list[str]:
        return ["        row, column = nl.arange(rows)[:, None], nl.arange(width)[None, :]"]

    def view(self, tile: str, half: int | None, dtype: str = "int16") -> str:
        if half is None:
            return f"{tile}.view(nl.{dtype})"
        return f"{tile}.view(nl.{dtype})[row, 2 * column + 1]" if half else f"{tile}.view(nl.{dtype})[row, 2 * column]"

    def seed(self) -> list[str]:
        return ["    seed_in = nl.load(seed)", "    nl.random_seed(seed=seed_in)"]

    def _draw(self, dst: str) -> list[str]:
        """From uniform numbers, of which this dialect has no bits: the first 16 bits of the fraction of 1 + each."""
        add = [("data", "uniform"), ("op0", "nl.add"), ("operand0", "1.0"), ("engine", "nisa.vector_engine")]
        fraction = [("data", "fraction.view(nl.int32)"), ("op0", "nl.bitwise_and"), ("operand0", "0x7FFF80")]
        shift = [("op1", "nl.right_shift"), ("operand1", "7"), ("engine", "nisa.vector_engine"), ("dtype", "nl.int32")]
        return [
            "        uniform = nl.rand((rows, width), dtype=nl.float32)",
            *call(8, "nisa.tensor_scalar", [*add, ("dtype", "nl.float32")], "fraction = "),
            *call(8, "nisa.tensor_scalar", [*fraction, *shift], f"{dst} = "),
        ]

    def load_numbers(self, count: int, suffix: str = "") -> list[str]:
        return [f"    numbers{suffix} = nl.load(scalars{suffix}[0:PARTITIONS, 0:{count}])"]

    def instruction(
        self, i: Instruction, dst: str, value: Value, space: str | None, text: Mapping[Any, str]
    ) -> list[str]:
        arguments = self.arguments(i, text)
        if i.kind == "rng":
            return self._draw(dst)
        if value.op in HALVES:
            lines = self.new_tile(dst, value, space) if space else []
            half = HALVES[value.op]
            before = f"{self.view(dst, half)}{'[row, column]' if half is None else ''} = "
            return lines + call(8, f"nisa.{i.kind}", [*arguments, ("dtype", "nl.int16")], before)
        if i.kind == "tensor_copy_predicated":
            return call(8, f"nisa.{i.kind}", [("dst", dst), *arguments])
        if i.kind == "memset":
            arguments = [("shape", "(rows, width // block)" if value.block else "(rows, width)"), *arguments]
        lines = self.new_tile(dst, value, space) if space == "psum" else []
        if i.bits:
            made = call(8, f"nisa.{i.kind}", [*arguments, ("dtype", f"nl.{i.bits}")], "bits = ")
            return [*made, f"        {dst} = bits.view(nl.{value.dtype})"]
        dst = f"{dst}[...]" if space == "psum" else dst
        return lines + call(8, f"nisa.{i.kind}", [*arguments, ("dtype", f"nl.{value.dtype}")], f"{dst} = ")

    def on_block(self, i: Instruction, dst: str, value: Value, text: Mapping[Any, str]) -> list[str]:
        arguments = [*self.arguments(i, text), ("dtype", f"nl.{value.dtype}")]
        return call(12, f"nisa.{i.kind}", arguments, f"{dst} = ")


DIALECTS = {d.name: d for d in (Nki(), Beta1())}


def _bits(tile: str, i: Instruction) -> str:
    """A tile as an instruction takes it: as the integers that its bits are, if it works on those."""
    return f"{tile}.view(nl.{i.bits})" if i.bits else tile
