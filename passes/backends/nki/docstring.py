"""Names the values of a kernel, and writes its docstring: tensors, arithmetic as equations, and its estimated cost.

Costs are estimated from documented figures: bytes, instructions and cycles, and what bounds the kernel. The unit is one
column: one element in each of 128 partitions, that is 128 parameters. The estimate assumes that all engines work in
parallel, which is the purpose of two buffers for each tile. We have measured nothing.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import STORAGE_TYPES
from collage_neuron.passes.backends.nki import hardware, ir
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, Generation
from collage_neuron.passes.backends.nki.ir import (
    HALVES,
    MASK,
    MASKS,
    Column,
    Instruction,
    Spread,
    Value,
    View,
    itemsize,
    number,
)
from collage_neuron.passes.backends.nki.schedule import Plan, shape_of, table_loads
from collage_neuron.passes.backends.nki.tiling import Tiling, tile_of


@dataclass(frozen=True)
class Estimate:
    """The cost of a kernel on a target; times are in nanoseconds per column."""

    read: int
    written: int
    """Bytes per parameter, without the words that blocks share."""
    instructions: dict[str, int]
    cycles: dict[str, float]
    """Cycles per column, by engine."""
    times: dict[str, float]
    """By engine, and by port that two engines share; the time of ScalarE includes loading its tables."""
    table_loads: int
    """Number of function tables that ScalarE loads per DMA tile."""
    memory: float
    """The time of the DMA, at the documented bandwidth."""
    sbuf: int
    """Bytes per partition, with two buffers for each tile."""

    @property
    def bytes(self) -> int:
        """Bytes per parameter, read and written."""
        return self.read + self.written

    @property
    def bound(self) -> str:
        """The busiest engine or port."""
        return max(self.times, key=lambda r: self.times[r]) if self.times else "memory"

    @property
    def ratio(self) -> float:
        """Time of the busiest resource over the time of the DMA."""
        return max(self.times.values(), default=0.0) / self.memory


def estimate(plan: Plan, tiling: Tiling, g: Generation) -> Estimate:
    """The cost of `plan` on the generation `g`."""
    moved = (*plan.program.loads, *plan.program.stores.values())
    read = sum(itemsize(v.dtype) for v in plan.program.loads if not v.block)
    written = sum(itemsize(v.dtype) for v in plan.program.stores.values() if not v.block)
    shared = sum(itemsize(v.dtype) for v in moved if v.block) / BLOCK
    shared += len(plan.program.measures) * itemsize("float32") / tiling.chunk
    cycles, instructions = dict.fromkeys(ENGINES, 0.0), dict.fromkeys(ENGINES, 0)
    loads = table_loads(plan.program)
    times: dict[str, float] = defaultdict(float, {"scalar": loads * hardware.TABLE_LOAD / tiling.columns})
    for value, instruction in plan.steps:
        shape, engine = shape_of(value, instruction, plan.in_psum), instruction.engine
        used = dict(hardware.times_of(instruction.kind, engine, shape, g, tiling.chunk))
        cycles[engine] += used[engine] * g.clock[engine]
        instructions[engine] += 1
        for resource, time in used.items():
            times[resource] += time
    return Estimate(
        read=read,
        written=written,
        instructions=instructions,
        cycles=cycles,
        times=dict(times),
        table_loads=loads,
        memory=PARTITIONS * (read + written + shared) / g.bandwidth,
        sbuf=tiling.sbuf,
    )


NOUNS = {
    "add": "sum", "subtract": "difference", "multiply": "product", "maximum": "larger", "minimum": "smaller",
    "clamp": "clamped", "copy": "copy", "own_copy": "copy", "fill": "constant", "sqrt": "root",
    "reciprocal": "reciprocal", "exact_reciprocal": "reciprocal", "exp": "exponential", "log": "logarithm",
    "power": "power", "sign": "sign", "abs": "magnitude", **dict.fromkeys(MASKS, "mask"),
    "power_of_two": "unit", "inverse_power_of_two": "inverse", "lower": "value", "masked": "places",
    "block_max": "largest", "total": "measure", "peak": "peak", "draw": "random",
    "carried": "rounded",
}  # fmt: skip

PARTS = {None: "bits", 0: "lower", 1: "upper"}
"""The names of views as int16, by half."""

INFIX = {ir.BINARY[f]: sign for f, sign in ir.SYMBOLS.items() if f in ir.BINARY}
INFIX |= {"logical_or": "or", "logical_and": "and"}


def names_of(plan: Plan) -> dict[Value, str]:
    """A Python name for the tile of each value: `<key>_in` and `<key>_out` for loads and stores."""
    # What is loaded or stored is called as its component; what has no such name is numbered by what it is.
    names = {v: f"{v.name}_in" for v in plan.program.loads}
    for key, value in plan.program.stores.items():
        names.setdefault(tile_of(value), f"{key}_out")
    for value, _ in plan.steps:
        if _is_pair(value):
            names.setdefault(value, f"old_{value.args[0].name}")  # type: ignore[union-attr]  # two tiles
    for key, value in plan.program.stores.items():
        if value.op == "copy" and isinstance(value.args[0], Value):
            names.setdefault(tile_of(value.args[0]), f"new_{key}")
    names |= {value: f"measure_{k}" for k, value in enumerate(plan.program.measures)}
    count: Counter[str] = Counter()
    for value, _ in plan.steps:
        tile = tile_of(value)
        if tile not in names:
            noun = NOUNS[tile.op] if value.op != "select" else "chosen"
            count[noun] += 1
            names[tile] = f"{noun}_{count[noun]}"
        names[value] = names[tile]
    return names


def _is_pair(value: Value) -> bool:
    """Returns True if a value is the sum of the two words of a component."""
    words = list(value.tiles())
    loads = value.op == "add" and [w.op for w in words] == ["load", "load"]
    return loads and words[1].name.startswith(words[0].name + "_")


def formula(value: Value, instruction: Instruction, names: Mapping[Value, str], columns: Mapping[Column, str]) -> str:
    """The instruction as an equation; `bf16(...)` is its rounding, every other operation is fp32."""

    def text(x: Any) -> str:
        if isinstance(x, View):
            part = f"{PARTS[x.half]}({names[x.tile]})"
            return part if x.dtype == "int16" else f"uint16({part})"
        if isinstance(x, Spread):
            return f"{names[x.tile]}{'[block]' if x.tile.block else ''}"
        if isinstance(x, Value):
            return names[x]
        return columns[x] if isinstance(x, Column) else number(x)

    body = _body(instruction, text)
    if value.op in HALVES:
        return f"{PARTS[HALVES[value.op]]}({names[value]}) = int16({body})"
    mask = value.op in MASKS and value.dtype == MASK
    # Nothing is rounded of bits that are masked, or drawn.
    exact = value.dtype == "float32" or mask or instruction.bits or instruction.kind == "rng"
    rounding = value.dtype.replace("bfloat", "bf")
    return f"{names[value]} = {body if exact else f'{rounding}({body})'}"


def _body(i: Instruction, text: Any) -> str:
    if i.kind == "tensor_tensor":
        return _applied(i["op"], text(i["data1"]), text(i["data2"]))
    if i.kind in ("tensor_scalar", "scalar_tensor_tensor"):
        first = _operation(i, 0, text(i["data"]), text)
        return first if i["op1"] is None else _operation(i, 1, f"({first})" if i["op0"] in INFIX else first, text)
    if i.kind == "activation":
        return _activation(i, text)
    if i.kind == "tensor_reduce":
        return f"{'sum' if i['op'] == 'add' else 'max' if i.whole else 'block_max'}({text(i['data'])})"
    if i.kind == "rng":
        return "16 random bits"
    if i.kind == "reciprocal":
        return f"1 / {text(i['data'])}"
    if i.kind == "tensor_copy_predicated":
        return f"{text(i['src'])} where {text(i['predicate'])}"
    return text(i["src"]) if i.kind == "tensor_copy" else number(i["value"])


def _operation(i: Instruction, number: int, x: str, text: Any) -> str:
    op, y = i[f"op{number}"], i[f"operand{number}"]
    if op == "abs":
        return f"abs({x})"
    return _applied(op, text(y), x) if i[f"reverse{number}"] else _applied(op, x, text(y))


def _applied(op: str, x: str, y: str) -> str:
    return f"{x} {INFIX[op]} {y}" if op in INFIX else f"{op}({x}, {y})"


def _activation(i: Instruction, text: Any) -> str:
    x = text(i["data"])
    x = x if i["scale"] is None else f"{x} * {text(i['scale'])}"
    x = x if i["bias"] is None else f"{x} + {text(i['bias'])}"
    return x if i["op"] == "copy" else f"{i['op']}({x})"


@dataclass(frozen=True)
class Argument:
    """An HBM tensor that a kernel takes: a component of a state."""

    key: str
    dtype: str
    read: bool
    written: bool
    block: bool = False
    """True if it has one element for each block of elements."""


MEASURES = "measures"
"""The argument for the totals of a kernel that measures: after the components, flat, fp32, all of a chunk together."""


@dataclass(frozen=True, eq=False)
class Design:
    """Everything from which the text of a kernel is generated."""

    name: str
    """The name of the function, and of its module."""
    title: str
    """The purpose of the kernel; lines after the first are printed unchanged."""
    arguments: tuple[Argument, ...]
    scalars: Sequence[str]
    """Descriptions of the entries of the update's scalar vector."""
    plan: Plan
    tiling: Tiling
    cost: Estimate
    generation: Generation
    measures: tuple[str, ...] = ()
    """Descriptions of the totals of a kernel that measures."""
    dialect: str = "nki"


def docstring(d: Design) -> list[str]:
    """The lines between the quotes."""
    how = f"Generated by collage_neuron for {d.generation.target}"
    generated = f"{how}; change passes/backends/nki/ instead."
    parts = [d.title.splitlines(), _wrapped(generated), list(_tensors(d)), list(_equations(d)), list(_costs(d))]
    return [line for part in parts for line in (*part, "")][:-1]


def _wrapped(text: str, indent: str = "", more: str = "") -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=indent, subsequent_indent=more or indent, break_long_words=False)


def _tensors(d: Design) -> Iterator[str]:
    yield from ("HBM tensors of N elements, in any shape; what is written is written in place and returned:", "")
    width = max(len(a.key) for a in d.arguments)
    for a in d.arguments:
        use = " and ".join(word for word, used in (("read", a.read), ("written", a.written)) if used)
        size = "[M]" if a.key == MEASURES else "[B]" if a.block else "[N]"
        yield f"    {a.key:<{width}}  {size} {a.dtype}, {use}"
    if d.plan.columns:
        shape = f"[{PARTITIONS}, {len(d.plan.columns)}]"
        yield f"    {'scalars':<{width}}  {shape} float32, read: in each column a number of the step, in all rows"
    if d.plan.draws:
        yield f"    {'seed':<{width}}  [1, 1] int32, read: that of the vector engine's generator, in each step another"
    yield ""
    yield from _wrapped(
        f"They are cut into lines of `columns` elements, of which an instruction takes `width`, a divisor of "
        f"`columns`; both are Python ints, at most {d.tiling.columns} and {d.tiling.chunk}, and so is `total`, which "
        f"is N. A tile is {PARTITIONS} lines."
    )
    yield ""
    for k, column in enumerate(d.plan.columns):
        yield from _wrapped(f"n{k} = {column.text(d.scalars)}", " " * 4, " " * 9)
    yield from _about_measures(d)


def _about_measures(d: Design) -> Iterator[str]:
    if d.measures:
        yield from [""] * bool(d.plan.columns)
        what = "what `chunk_sums.py` finds of it" if d.plan.program.sums else "the sums of its terms in fp32"
        yield from _wrapped(f"{MEASURES} has {len(d.measures)} numbers for each chunk of each line, {what}:")
        yield from ("", *(f"    measure_{k}  {what}" for k, what in enumerate(d.measures)))


def _about_blocks(d: Design) -> Iterator[str]:
    if d.plan.has_blocks:
        yield from _wrapped(
            f"B words, one for each block: {BLOCK} elements of a row, of which the last block may have fewer; `length` "
            f"is that of a row, a Python int. If it is not a multiple of {BLOCK} and there are several rows, the "
            "lines are the rows, and `columns` and `width` are of their whole blocks. What is marked [block] is the "
            "word of an element's block: an instruction with one runs once for each block, and so does block_max, the "
            "largest element of a block."
        )
        yield ""


def _equations(d: Design) -> Iterator[str]:
    yield from _about_blocks(d)
    used = {value.dtype for value, i in d.plan.steps if i.kind != "rng"}
    integers = (t.nki for t in STORAGE_TYPES.values() if not t.is_floating and t.nki in used)
    also = "".join(f", {name}(...) too, and saturates" for name in integers)
    yield from _wrapped(
        f"A chunk as equations, an instruction each; bf16(...) rounds to nearest even{also}, every other operation is "
        "fp32:"
    )
    yield ""
    names, numbers = names_of(d.plan), {c: f"n{k}" for k, c in enumerate(d.plan.columns)}
    before = 0
    for value, instruction in d.plan.steps:
        phase = d.plan.program.phases[value]
        yield from [""] * (phase != before)
        before = phase
        yield from _wrapped(formula(value, instruction, names, numbers), " " * 4, " " * 8)


def _costs(d: Design) -> Iterator[str]:
    c = d.cost
    yield from _wrapped(
        f"Bytes a parameter: {c.read} read, {c.written} written. Bytes of SBUF a partition, with two buffers of every "
        f"tile: {c.sbuf} of {d.generation.sbuf}. Estimate for one column (one element in each of {PARTITIONS} "
        "partitions), from the figures in passes/backends/nki/hardware.py:"
    )
    yield ""
    for engine, n in c.instructions.items():
        if n:
            time = c.cycles[engine] / d.generation.clock[engine]
            yield f"    {engine:<9} {n:>3} instructions {c.cycles[engine]:>6.2f} cycles {time:>6.2f} ns"
    if c.table_loads:
        loads = f"{c.table_loads} loads of function tables a DMA tile"
        yield f"    {'scalar':<9}   + {loads}: {c.times['scalar']:.2f} ns in all"
    for port in (r for r in c.times if r not in c.instructions):
        yield f"    {port:<9} {c.times[port]:>36.2f} ns"
    yield f"    {'DMA':<9} {c.memory:>36.2f} ns; bound by {c.bound}: {c.ratio:.2f} times this"
