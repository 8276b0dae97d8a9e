"""The two dialects of NKI: how each writes the same instructions, allocations and loops as text.

`nki`: `import nki`, versions 0.6 and 0.7, in the subset that both the parser of 0.6 and the tracer of 0.7 accept.
`beta1`: `neuronxcc.nki`, which the last Neuron SDKs (2.27 to 2.29) that support training on trn1 carry.

Lines are written without the indentation of what they stand in, and of any length: `emit` formats them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collage_neuron.passes.backends.nki.ir import HALVES, Column, Instruction, Spread, Value, View, number
from collage_neuron.passes.backends.nki.tiling import Cut

UpdateTile = Callable[..., str]
"""Writes a call of `_update_tile`, with where the tile is."""

TAKES_ENGINE = frozenset({"tensor_tensor", "tensor_scalar", "tensor_copy", "memset", "rng"})
"""Instructions that more than one engine can run, and that name the engine."""


def indented(*lines: str) -> list[str]:
    """Lines in a block."""
    return [f"    {line}" if line else line for line in lines]


SHARES = '''\
def _first(lines):
    """The first line of this core: all take as many, and the last one also what is left."""
    return lines // nl.num_programs() * nl.program_id(0)


def _whole(lines):
    """The lines in whole tiles of each core: as many on all."""
    share = lines // nl.num_programs()
    whole = share // PARTITIONS * PARTITIONS
    if share > 1 and share - whole == 1:
        whole = whole - PARTITIONS
    return whole


def _looped(lines, tiles):
    """Of these, the lines that a loop updates, so many tiles in a turn: none, if it had one turn."""
    turn = tiles * PARTITIONS
    looped = _whole(lines) // turn * turn
    if looped == turn:
        looped = 0
    return looped'''
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
    rest: tuple[str, ...] = ("base + whole", "None")
    """Where the tile of the lines that are left is."""
    loops = True
    """True if the device runs loops, one of several tensors too, and cores of a logical one share the lines (`SHARES`).

    Then functions are told of the register with the place of a tile (`at`), of the tiles in a turn (`tiles`), and
    whether a loop over several tensors before it has updated the whole tiles (`done`).
    """

    def cut_arguments(self, cut: Cut, total: int) -> tuple[int, ...]:
        """The last arguments of a kernel: how tensors of so many elements are cut, and what is known of its loops."""
        return (total, *[cut.length] * bool(cut.length), cut.columns, cut.width, *[cut.tiles] * self.loops)

    def parameter(self, name: str, written: bool) -> str:
        """A parameter of the kernel, a tensor in HBM."""
        return name

    def allocate(self, name: str, rows: str, columns: str, dtype: str, space: str = "sbuf") -> str:
        """A tile."""
        return f"{name} = nl.ndarray(({rows}, {columns}), dtype=nl.{dtype}, buffer=nl.{space})"

    def index(self, blocks: bool, first: str, words: str) -> list[str]:
        """The text that addresses a tile of HBM tensors, whose first one is `first`, and of the words of its blocks."""
        if not blocks:
            return [f"columns = {first}.shape[1]", "pattern = [[columns, rows], [1, columns]]"]
        return [
            f"length, blocks = {first}.shape[1], {words}.shape[1]",
            "pattern = [[length, rows], [1, columns]]",
            "pattern_of_words = [[blocks, rows], [1, columns // block]]",
        ]

    def index_of_measures(self, blocks: bool) -> list[str]:
        """The text that addresses the totals of a tile in HBM: some for each of its chunks, in every line."""
        return [
            "pattern_of_measures = [[measures.shape[1], rows], [1, marks]]",
            f"offset_of_measures = line * measures.shape[1]{' + mark' if blocks else ''}",
        ]

    def place(self, key: str, value: Value | None, blocks: bool) -> str:
        """What is addressed of a tensor in HBM: by `index`, or, without a value, by `index_of_measures`."""
        pattern, offset = "pattern", "line * length + first" if blocks else "line * columns"
        if value is None:
            pattern, offset = "pattern_of_measures", "offset_of_measures"
        elif value.block:
            pattern, offset = "pattern_of_words", "line * blocks + word"
        # The loop's register counts lines, and nothing can be computed of it: it is added to the address as it is.
        return f"{key}.ap(pattern={pattern}, offset={offset}, scalar_offset=at, indirect_dim=0)"

    def load(self, name: str, key: str, value: Value, blocks: bool) -> list[str]:
        """Loads a tile from HBM."""
        made = self.allocate(name, "rows", "columns // block" if value.block else "columns", value.dtype)
        return [made, f"nisa.dma_copy(dst={name}, src={self.place(key, value, blocks)})"]

    def store(self, key: str, name: str, value: Value | None, blocks: bool) -> str:
        """Stores a tile to HBM."""
        return f"nisa.dma_copy(dst={self.place(key, value, blocks)}, src={name})"

    def share(self, lines: str) -> list[str]:
        """The lines of this core: from `base` on so many, of which `whole` are in whole tiles."""
        return [
            f"base = _first({lines})",
            f"lines = {lines} // nl.num_programs()",
            "if nl.program_id(0) == nl.num_programs() - 1:",
            f"    lines = {lines} - base",
            f"whole = _whole({lines})",
            f"looped = _looped({lines}, tiles)",
        ]

    def loop(self, update_tile: UpdateTile) -> list[str]:
        """The tiles of PARTITIONS lines: a loop that the device runs, several in a turn, and copies of what is left."""
        # Nothing can be computed of the register `line`: the tile of a turn is an offset known to Python, beside it.
        return [
            "if looped > 0 and not done:",
            "",
            "    def body(line):",
            "        for tile in range(tiles):",
            f"            {update_tile('base + tile * PARTITIONS', 'line', 'PARTITIONS')}",
            "",
            "    nl.fori_loop(0, looped, body, step=tiles * PARTITIONS)",
            "for line in range(looped, whole, PARTITIONS):",
            f"    {update_tile('base + line', 'None', 'PARTITIONS')}",
        ]

    def load_numbers(self, count: int, suffix: str = "") -> list[str]:
        """Loads the scalar input into a tile."""
        tile = self.allocate(f"numbers{suffix}", "PARTITIONS", str(count), "float32")
        return [tile, f"nisa.dma_copy(dst=numbers{suffix}, src=scalars{suffix})"]

    def new_tile(self, name: str, value: Value, space: str) -> str:
        """A tile as wide as a chunk."""
        columns = "1" if value.chunk else "width // block" if value.block else "width"
        return self.allocate(name, "rows", columns, value.dtype, space)

    def instruction(
        self, i: Instruction, dst: str, value: Value, space: str | None, text: Mapping[Any, str]
    ) -> list[str]:
        """An instruction; `space` is the memory of its new tile, or None if its tile exists already."""
        lines = [self.new_tile(dst, value, space)] if space else []
        dst = self.view(dst, HALVES[value.op]) if value.op in HALVES else _bits(dst, i)
        return [*lines, f"nisa.{i.kind}({', '.join([f'dst={dst}', *self.arguments(i, text)])})"]

    def chunk(self) -> list[str]:
        """The text that addresses halves of the elements of a tile, at the start of a chunk that does."""
        return []

    def view(self, tile: str, half: int | None, dtype: str = "int16") -> str:
        """A tile as int16: all of its elements, or one half of each."""
        return f"{tile}.view(nl.{dtype})" + ("" if half is None else f"[:, {half}::2]")

    def seed(self) -> list[str]:
        """Seeds the generator of the vector engine: each core has one, and a seed for it."""
        return [
            "core = nl.program_id(0)",
            "seed_in = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)",
            "nisa.dma_copy(dst=seed_in, src=seed[0:1, core : core + 1])",
            "nisa.set_rng_seed(src_seeds=seed_in)",
        ]

    def arguments(self, i: Instruction, text: Mapping[Any, str]) -> Iterable[str]:
        """The arguments of an instruction, except its destination."""
        for name, x in i.fields:
            yield f"{name}={self._operand(x, i, text)}"
        if i.kind == "tensor_reduce":
            yield "axis=1"
        if i.kind in TAKES_ENGINE:
            yield f"engine={self.engine.format(i.engine)}"

    def _operand(self, x: Any, i: Instruction, text: Mapping[Any, str]) -> str:
        if isinstance(x, View):
            return self.view(text[x.tile], x.half, x.dtype)
        if isinstance(x, Spread):
            return text[x.tile]
        if isinstance(x, (Value, Column)):
            return _bits(text[x], i)
        return f"nl.{x}" if isinstance(x, str) else "True" if x is True else number(x)


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
    rest = ("whole",)
    loops = False

    def parameter(self, name: str, written: bool) -> str:
        # Inputs of this dialect are immutable unless they are annotated so, and then they must be returned.
        return f"{name}: nt.mutable_tensor" if written else name

    def allocate(self, name: str, rows: str, columns: str, dtype: str, space: str = "sbuf") -> str:
        return super().allocate(name, f"nl.par_dim({rows})", columns, dtype, space)

    def index(self, blocks: bool, first: str, words: str) -> list[str]:
        places = "at_line, at_column = nl.arange(rows)[:, None] + line, nl.arange(columns)[None, :]"
        if not blocks:
            return [f"columns = {first}.shape[1]", places]
        return [f"{places} + first", "at_word = nl.arange(columns // block)[None, :] + word"]

    def index_of_measures(self, blocks: bool) -> list[str]:
        return [f"at_mark = nl.arange(marks)[None, :]{' + mark' if blocks else ''}"]

    def place(self, key: str, value: Value | None, blocks: bool) -> str:
        return f"{key}[at_line, {'at_mark' if value is None else 'at_word' if value.block else 'at_column'}]"

    def load(self, name: str, key: str, value: Value, blocks: bool) -> list[str]:
        return [f"{name} = nl.load({self.place(key, value, blocks)})"]

    def store(self, key: str, name: str, value: Value | None, blocks: bool) -> str:
        return f"nl.store({self.place(key, value, blocks)}, value={name})"

    def share(self, lines: str) -> list[str]:
        # As `_whole` of SHARES: no tile of a single line, unless there is only one.
        return [
            f"lines = {lines}",
            "whole = lines // PARTITIONS * PARTITIONS",
            "if lines > 1 and lines - whole == 1:",
            "    whole = whole - PARTITIONS",
        ]

    def loop(self, update_tile: UpdateTile) -> list[str]:
        return [
            "if whole > 0:",
            "    for tile in nl.affine_range(whole // PARTITIONS):",
            f"        {update_tile('tile * PARTITIONS', 'PARTITIONS')}",
        ]

    def chunk(self) -> list[str]:
        return ["row, column = nl.arange(rows)[:, None], nl.arange(width)[None, :]"]

    def view(self, tile: str, half: int | None, dtype: str = "int16") -> str:
        places = {None: "", 0: "[row, 2 * column]", 1: "[row, 2 * column + 1]"}
        return f"{tile}.view(nl.{dtype}){places[half]}"

    def seed(self) -> list[str]:
        return ["seed_in = nl.load(seed)", "nl.random_seed(seed=seed_in)"]

    def _draw(self, dst: str) -> list[str]:
        # This dialect has uniform numbers and no random bits. 1 plus such a number is below 2: its exponent is fixed,
        # and the bits 7 to 22 are the first 16 of its fraction.
        one = "data=uniform, op0=nl.add, operand0=1.0, engine=nisa.vector_engine, dtype=nl.float32"
        mask = "data=fraction.view(nl.int32), op0=nl.bitwise_and, operand0=0x7FFF80"
        shift = "op1=nl.right_shift, operand1=7, engine=nisa.vector_engine, dtype=nl.int32"
        return [
            "uniform = nl.rand((rows, width), dtype=nl.float32)",
            f"fraction = nisa.tensor_scalar({one})",
            f"{dst} = nisa.tensor_scalar({mask}, {shift})",
        ]

    def load_numbers(self, count: int, suffix: str = "") -> list[str]:
        return [f"numbers{suffix} = nl.load(scalars{suffix}[0:PARTITIONS, 0:{count}])"]

    def instruction(
        self, i: Instruction, dst: str, value: Value, space: str | None, text: Mapping[Any, str]
    ) -> list[str]:
        arguments = ", ".join(self.arguments(i, text))
        if i.kind == "rng":
            return self._draw(dst)
        # It alone takes a destination in this dialect too: where the predicate is 0, that stays as it is.
        if i.kind == "tensor_copy_predicated":
            return [f"nisa.{i.kind}(dst={dst}, {arguments})"]
        if i.kind == "memset":
            arguments = f"shape=(rows, {'width // block' if value.block else 'width'}), {arguments}"
        made = f"nisa.{i.kind}({arguments}, dtype=nl.{{}})"
        if i.bits:
            # The new tile is one of integers, and is then seen as the numbers whose bits they are.
            return [f"bits = {made.format(i.bits)}", f"{dst} = bits.view(nl.{value.dtype})"]
        # An instruction returns a new tile in SBUF: one in PSUM, or one of halves, is made before and assigned to.
        lines = [self.new_tile(dst, value, space)] if space == "psum" or (space and value.op in HALVES) else []
        if value.op in HALVES:
            half = HALVES[value.op]
            target = f"{self.view(dst, half)}{'[row, column]' if half is None else ''}"
            return [*lines, f"{target} = {made.format('int16')}"]
        return [*lines, f"{dst}{'[...]' if space == 'psum' else ''} = {made.format(value.dtype)}"]


DIALECTS = {d.name: d for d in (Nki(), Beta1())}


def _bits(tile: str, i: Instruction) -> str:
    """A tile as an instruction takes it: as the integers that its bits are, if it works on those."""
    return f"{tile}.view(nl.{i.bits})" if i.bits else tile
