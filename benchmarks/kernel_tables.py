"""Estimates what kernels cost on Trainium, by the cost model: the tables of docs/kernels.md.

    python benchmarks/kernel_tables.py                     # prints all tables, in a minute or two
    python benchmarks/kernel_tables.py --write             # puts them into docs/kernels.md
    python benchmarks/kernel_tables.py --summary           # AdamW's step by strategy, beside that of fp32 masters
    python benchmarks/kernel_tables.py --model 4096x4096,4096    # the time of a step on tensors of these shapes

No number is a measurement.
"""

from __future__ import annotations

import argparse
import math
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch.fx as fx
from kernel_examples import Entry, adamw, adamw_kernel, adamw_update, job_of
from kernel_times import ADAMW_BF16, calibrated, time_of
from torch.optim import SGD

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import BUILT_IN
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, bytes_with_adam
from collage_neuron.numerics.threefry import Words, threefry
from collage_neuron.passes.backends.nki.bodies import count_as, with_bodies
from collage_neuron.passes.backends.nki.emit import Work
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, TARGETS, Access, Generation, Shape, cost_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki, reason_against
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.ir.update import Update

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"

# A table by strategy or format ----------------------------------------------------------------------------------------

TITLES = (
    "target", "bytes", *(f"{e}: instructions, ns" for e in ENGINES), "DMA ns", "bound by", "ratio", "calibrated",
    "looped",
)  # fmt: skip

BEGIN, END = "<!-- costs: python benchmarks/kernel_tables.py --write -->", "<!-- end of costs -->"
"""The lines of a document between which the tables stand."""


def table(
    update_of: Callable[[str], Update],
    names: Iterable[str] = STRATEGIES,
    targets: Iterable[str] = TARGETS,
    *,
    title: str = "strategy",
) -> str:
    """The table, with a row for each strategy (or what else `title` says) and target.

    Those that no kernel runs have a row that says why.
    """
    rows = (row for name in names for row in _rows(name, update_of(name), tuple(targets)))
    return markdown((title, *TITLES), rows)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows))


def _rows(name: str, update: Update, targets: Iterable[str]) -> Iterator[list[str]]:
    try:
        reason = reason_against(update)
        kernels = [] if reason else [lowered(update, t) for t in targets]
    except UnsupportedUpdate as error:
        reason, kernels = str(error), []
    if reason:
        yield [f"`{name}`", "all", reason, *[""] * (len(TITLES) - 2)]
    for kernel in kernels:
        yield [f"`{name}`", kernel.target, *_cells(kernel)]


@cache
def lowered(update: Update, target: str) -> Kernel:
    """The kernel of an update."""
    return lower_to_nki(update, target)


LONG, TURN = 4096, 16
"""Tiles of the tensors, and of a turn of the loop over several of them, of which `looped` is."""


def looped(kernel: Kernel) -> float:
    """The calibrated time of long tensors in a loop of the newer dialect, over their DMAs' at documented bandwidth."""
    columns, total = kernel.tiling.columns, LONG * PARTITIONS * kernel.tiling.columns
    cut = Cut(columns, kernel.tiling.chunk, columns if kernel.plan.has_blocks else 0)
    work = Work(kernel.in_dialect("nki"), total, cut, TURN)
    return time_of(work) / (LONG * columns * kernel.cost.memory)


def _cells(kernel: Kernel) -> Iterator[str]:
    cost, clock = kernel.cost, TARGETS[kernel.target].clock
    yield f"{cost.read} + {cost.written}"
    for e in ENGINES:
        time = cost.times["scalar"] if e == "scalar" else cost.cycles[e] / clock[e]
        yield f"{cost.instructions[e]}, {time:.1f}"
    yield f"{cost.memory:.1f}"
    yield cost.bound
    yield f"{cost.ratio:.2f}"
    yield f"{calibrated(kernel).longest / cost.memory:.2f}"
    yield f"{looped(kernel):.2f}"


def monitored_costs(
    strategies: Iterable[str] = ("bf16", "plus", "split433", "split423"), targets: Iterable[str] = tuple(TARGETS)
) -> str:
    """The costs of a step of AdamW with the sums and counts of a monitor, in Markdown."""

    def update_of(strategy: str) -> Update:
        return job_of(Entry(adamw, strategy), measured=True).update

    return table(update_of, strategies, targets, title="measured step of")


def format_costs(formats: Iterable[str] = tuple(BUILT_IN), targets: Iterable[str] = tuple(TARGETS)) -> str:
    """The costs of SGD with momentum on each target, in Markdown: a bf16 parameter, and the momentum in each format."""

    def update_of(name: str) -> Update:
        return job_of(Entry(lambda ps: SGD(ps, lr=1e-2, momentum=0.9), {"param": "bf16", "*": name})).update

    return table(update_of, formats, targets, title="format of the momentum")


# The step by strategy -------------------------------------------------------------------------------------------------

ELEMENTS = 1e9
"""The parameters on a core for which `summary` has times."""


def summary(names: Iterable[str] = STRATEGIES) -> Iterator[str]:
    """Lines: AdamW's step in milliseconds and what limits it, and its time over that of fp32 master weights."""
    yield f"milliseconds for {ELEMENTS:.0e} parameters on a core; in brackets the limit, over the memory's time"
    times: dict[str, list[float]] = {}
    for name in sorted(names, key=bytes_with_adam, reverse=True):
        found = [lowered(adamw_update(name), target) for target in TARGETS]
        costs = [calibrated(kernel) for kernel in found]
        times[name] = [cost.longest * ELEMENTS / PARTITIONS / 1e6 for cost in costs]
        slower = [max(cost.times.values()) / cost.transfer for cost in costs]
        limits = ["memory" if x <= 1 else f"{cost.bound}, {x:.1f}" for cost, x in zip(costs, slower, strict=True)]
        cells = (f"{ms:5.0f} ({limit})" for ms, limit in zip(times[name], limits, strict=True))
        yield f"{name:<17}{bytes_with_adam(name):>3}  {''.join(f'{cell:<21}' for cell in cells)}".rstrip()
    for name, own in times.items():
        over = [a / b for a, b in zip(own, times["fp32"], strict=True)]
        yield f"{name}: {min(over):.1f} to {max(over):.1f} times as long as fp32"


# Random bits ----------------------------------------------------------------------------------------------------------

CHUNK = 512
DRAW_TITLES = ("random bits of an element", "target", "vector ns", "gpsimd ns", "together ns")


def table_of_draws(targets: Iterable[str] = TARGETS) -> str:
    """Random bits: nanoseconds a column. GpSimd and the vector engine take turns where they share a port to SBUF."""
    made = {"Threefry, up to four draws": _threefry, "the generator, one draw": _drawn}
    rows = [_row_of_draws(name, t, times(TARGETS[t])) for t in targets for name, times in made.items()]
    return markdown(DRAW_TITLES, rows)


def _row_of_draws(name: str, target: str, times: Mapping[str, float]) -> list[str]:
    vector, gpsimd = times.get("vector", 0.0), times.get("gpsimd", 0.0)
    together = vector + gpsimd if TARGETS[target].shared_ports else max(vector, gpsimd)
    return [name, target, *(f"{x:.1f}" for x in (vector, gpsimd, together))]


def _drawn(g: Generation) -> dict[str, float]:
    shape = Shape("", (), Access("uint16", "sbuf"))
    return {"vector": cost_of("rng", "vector", shape, g).time(g, CHUNK)}


def _threefry(g: Generation) -> dict[str, float]:
    """Sums that wrap are GpSimd's, operations on bits the vector engine's."""
    times: dict[str, float] = defaultdict(float)
    word = Access("int32", "sbuf")
    for op, tiles in _operations():
        kind, engine = ("tensor_tensor", "gpsimd") if op == "add" else ("tensor_scalar", "vector")
        kind = "tensor_tensor" if tiles == 2 else kind
        times[engine] += cost_of(kind, engine, Shape(f"bitwise_{op}", (word,) * tiles, word), g).time(g, CHUNK)
    return times


def _operations() -> Iterator[tuple[str, int]]:
    """The operations of one call on the number of an element, and how many of their operands are tiles."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    index, *others = (fx.Proxy(graph.placeholder(n), tracer) for n in ("index", "k0", "k1", "stream"))
    threefry(Words(others[0], others[1]), Words(index, others[2]))
    tiles = {index.node}
    for node in graph.nodes:
        used = sum(x in tiles for x in node.all_input_nodes)
        if used:
            tiles.add(node)
            yield "add" if node.target is operator.add else str(node.name), used


# A step on a model ----------------------------------------------------------------------------------------------------

Shapes = list[tuple[int, ...]]


def llama_7b() -> Shapes:
    """The parameters of Llama-7B (Touvron et al., 2023): 32 layers of width 4096, MLPs of 11008, 32000 words."""
    width, hidden, words = 4096, 11008, 32000
    layer = [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden), (width,), (width,)]
    return [(words, width), *layer * 32, (width,), (words, width)]


MODELS: Mapping[str, Callable[[], Shapes]] = {"llama-7b": llama_7b}
"""Presets by name."""


def shapes_of(model: str) -> Shapes:
    """The shapes of a preset, or of a list such as `4096x4096,4096`.

    Raises:
        ValueError: `model` is neither.
    """
    if model in MODELS:
        return MODELS[model]()
    try:
        shapes = [tuple(int(n) for n in shape.split("x")) for shape in model.split(",")]
    except ValueError:
        shapes = []
    if not shapes or any(n < 1 for shape in shapes for n in shape):
        raise ValueError(f"--model {model}: choose {', '.join(MODELS)}, or give shapes such as 4096x4096,4096")
    return shapes


def works_of(kernel: Kernel, shapes: Shapes) -> list[Work]:
    """What the kernel of a step does for parameters of these shapes."""
    return [Work(kernel, math.prod(shape), kernel.cut(shape)) for shape in shapes]


def answer(model: str, strategy: str) -> Iterator[str]:
    """The estimated time of AdamW's step on one core of each target, and that of fp32 master weights."""
    works = {name: [works_of(adamw_kernel(name, t), shapes_of(model)) for t in TARGETS] for name in (strategy, "fp32")}
    for name, of_targets in works.items():
        times = (sum(map(time_of, with_bodies(own))) / 1e6 for own in of_targets)
        yield f"{name}: {', '.join(f'{ms:.3g} ms on {t}' for t, ms in zip(TARGETS, times, strict=True))}"


def divided(shapes: Shapes, cores: int) -> Shapes:
    """What one core has of parameters that are divided along their first dimension, as ZeRO does."""
    return [(-(-shape[0] // cores), *shape[1:]) for shape in shapes]


class Size(NamedTuple):
    """The kernel of a step on parameters of some shapes."""

    instructions: int
    """Those that a compiler reads."""
    time: float
    """Nanoseconds, by the calibrated figures."""
    bound: float
    """Those of its DMAs alone, at the bandwidth that is reached."""


def size_of(kernel: Kernel, shapes: Shapes, cores: int = 1) -> Size:
    """The instructions of one step's kernel for parameters of these shapes, and its time.

    With two physical cores in a logical one instructions are those of the core with more of them.
    """
    works = with_bodies(works_of(kernel, shapes))
    count = sum(count_as(kernel, work.total, work.cut, cores) for work in works)
    count += bool(kernel.plan.columns)  # what loads the numbers
    bound = calibrated(kernel).transfer * sum(work.total for work in works) / PARTITIONS / cores
    time = sum(time_of(work, cores=cores) for work in works)
    return Size(count, time, bound)


MODEL, CORES = "llama-7b", 8
"""The model whose step `step_row` estimates, and the cores that share each of its tensors."""

STEP_TITLES = (
    f"AdamW, {MODEL}, a core of {CORES}", "target", "instructions traced", "ms", "ratio", "a tile a turn", "engines",
    "bound by", "LNC 2: traced", "ms",
)  # fmt: skip


def step_row(name: str, kernel: Kernel) -> list[str]:
    """A row of Markdown cells: the step of a strategy, by its kernel in the newer dialect.

    `ratio` is its time over that of its DMAs alone, at the bandwidth reached; so are that of loops with a tile of
    one parameter in a turn and that of the busiest engine. At the end what a logical core of two cores has, which takes
    twice the share of each tensor.
    """
    whole = MODELS[MODEL]()
    shapes = divided(whole, CORES)
    size, column = size_of(kernel, shapes), calibrated(kernel)
    single = sum(map(time_of, works_of(kernel, shapes)))
    engines = max(column.times.values()) / column.transfer
    ratios = (f"{x:.2f}" for x in (size.time / size.bound, single / size.bound, engines))
    traced, time = f"{size.instructions:,}", f"{size.time / 1e6:.2f}"
    bound, logical = column.bound if engines > 1 else "memory", ["", ""]
    if (cores := kernel.generation.cores) > 1:
        two = size_of(kernel, divided(whole, CORES // cores), cores)
        logical = [f"{two.instructions:,}", f"{two.time / 1e6:.2f}"]
    return [f"`{name}`", kernel.target, traced, time, *ratios, bound, *logical]


def measured_row() -> list[str]:
    """The same of the kernel that AWS measured, which has plain bf16 states: scaled to as many parameters."""
    elements = sum(map(math.prod, divided(MODELS[MODEL](), CORES)))
    time = ADAMW_BF16.milliseconds * ADAMW_BF16.cores * elements / ADAMW_BF16.elements
    return ["AWS's fused AdamW, bf16 (measured)", "trn2", "", f"{time:.2f}", "1.00", "", "", "memory", "", ""]


STEPS = ("bf16", "plus", "split433", "fp32_states", "fp32")
"""The strategies whose whole step is estimated: all of 12 bytes a parameter, and the two of plain states."""


def steps(strategies: Iterable[str] = STEPS, targets: Iterable[str] = tuple(TARGETS)) -> str:
    """The time of a step of AdamW on a large model, in loops that the device runs, in Markdown."""
    rows = [step_row(s, adamw_kernel(s, t)) for s in strategies for t in targets]
    return markdown(STEP_TITLES, [*rows, measured_row()])


# The program ----------------------------------------------------------------------------------------------------------

COSTS: Mapping[str, Callable[[], str]] = {
    "A step of a large model": steps,
    "AdamW by strategy": lambda: table(adamw_update),
    "SGD with its momentum in each format": format_costs,
    "A step that a monitor measures": monitored_costs,
    "Random bits": table_of_draws,
}
"""By title what makes each table of docs/kernels.md. All are estimates by the cost model, none a measurement."""


def costs() -> str:
    """All tables, in Markdown."""
    return "\n\n".join(f"**{title}**\n\n{make()}" for title, make in COSTS.items())


def put_into(path: Path, tables: str) -> str:
    """Replaces the tables in a document; returns what was done."""
    before, rest = path.read_text().split(f"{BEGIN}\n")
    path.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}")
    return f"wrote the costs into {path}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints or writes tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put all tables into docs/kernels.md")
    parser.add_argument("--summary", action="store_true", help="print AdamW's step by strategy alone")
    parser.add_argument("--model", help=f"print the time of a step on it: {', '.join(MODELS)}, or its shapes")
    parser.add_argument("--strategy", choices=list(STRATEGIES), default=DEFAULT, help="with --model: that of AdamW")
    options = parser.parse_args(arguments)
    if options.summary or options.model:
        for line in summary() if options.summary else answer(options.model, options.strategy):
            print(line, flush=True)
    else:
        print(put_into(PAGE, costs()) if options.write else costs())
    return 0


if __name__ == "__main__":
    sys.exit(main())
