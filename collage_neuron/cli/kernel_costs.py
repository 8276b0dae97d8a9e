"""What steps and random bits cost on Trainium, by strategy and format: estimates, as lines, or all in Markdown."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.strategies import DEFAULT, STRATEGIES, bytes_with_adam
from collage_neuron.numerics.threefry import Words, threefry
from collage_neuron.passes.backends.nki.bodies import Work, calibrated, time_of
from collage_neuron.passes.backends.nki.cost import ADAMW_BF16, Estimate
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, TARGETS, Access, Generation, Shape, cost_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki, reason_against
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.ir.update import Update

TITLES = (
    "target", "bytes", *(f"{e}: instructions, ns" for e in ENGINES), "DMA ns", "bound by", "ratio", "calibrated",
    "looped",
)  # fmt: skip

BEGIN, END = "<!-- costs: python -m collage_neuron kernels --costs docs/kernels.md -->", "<!-- end of costs -->"
"""The lines of a document between which the table stands."""


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
    cut = Cut(columns, kernel.tiling.chunk, columns if kernel.has_blocks else 0)
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
    yield f"{calibrated(kernel).whole:.2f}"
    yield f"{looped(kernel):.2f}"


PARAMETERS = 1e9
"""The parameters on a core for which `summary` has times."""

ERRORS = {
    "bf16": ("1.0", "1.0"), "light": ("1.8e-1", "9.9e-1"), "plus": ("3.2e-3", "9.9e-1"), "full": ("3.1e-3", "9.9e-1"),
    "fp32": ("3.4e-5", "6.0e-2"), "fp32_states": ("1.0", "1.0"),
    "stochastic": ("4.9e-1", "2.6e1"), "stochastic_states": ("5.0e-1", "2.6e1"),
    "split444": ("3.4e-5", "6.0e-2"), "split433": ("4.1e-5", "6.0e-2"), "split423": ("1.1e-4", "6.0e-2"),
    "split422": ("1.1e-3", "6.0e-2"), "split323": ("9.3e-3", "1.0"), "split322": ("9.3e-3", "1.0"),
    "split412": ("3.5e-2", "7.1e-2"), "split312": ("3.5e-2", "1.0"), "split311": ("8.9e-2", "1.0"),
}  # fmt: skip
"""What docs/strategies.md has in the columns `error at 1e-4` and `fine-tuning`."""

HEAD = """\
AdamW on Trainium: milliseconds of optimizer.step() for a billion parameters on one core. Estimates by a cost model:
no kernel of ours has run on a device. In brackets what limits the step: memory, or a part of the core, and the time of
that part as a multiple of the memory's.
"""

FOOT = """
bytes: of a parameter, its bf16 gradient and its two states.
error, fine-tuning: how far AdamW's weights end from those of float64, as a fraction of the way that they moved: the
largest found at learning rate 1e-4, and at those of fine-tuning (6e-7 to 1e-5). 1.0: no update arrived; more: roundings
moved the weights further than that. Measured on CPUs: docs/accuracy.md.
strategy: the digits of split433 and its like are the bytes of weight, first and second moment. plus, light and full
keep pairs of bf16 (the paper's); the two stochastic ones round stochastically; bf16 keeps no more; fp32 has master
weights and fp32 states, fp32_states only these.
limits: vector, scalar and gpsimd are the engines of a core. psum port: PSUM is a small memory on the chip, at which
vector and scalar take turns on trn1; the time of both there.

From AWS's documentation: clocks, and cycles of each instruction. Inferred: cycles of GpSimd (trn2, trn3).
Measured by others: bandwidth, on trn1 by a user, on trn2 by AWS with its own AdamW; for trn3 the same share is assumed.
Assumed: computing and moving overlap fully. The loops of a whole model's step (Llama-7B) add 3 to 10 %, and 40 to 90 %
where words are shared by blocks (split423 and smaller).
--costs FILE writes every table in Markdown: engines, a model's step, formats, monitored steps. docs/kernels.md has
them, with the meaning of each column, and what the least certain figures change."""


def summary(update_of: Callable[[str], Update], names: Iterable[str] = STRATEGIES) -> Iterator[str]:
    """Lines for a terminal: the time of a step by strategy and target, where the figures are from, a conclusion."""
    yield HEAD
    yield _line("strategy", "bytes", ("error at 1e-4", "fine-tuning"), TARGETS)
    times: dict[str, list[float]] = {}
    for name in sorted(names, key=bytes_with_adam, reverse=True):
        found = [calibrated(lowered(update_of(name), target)) for target in TARGETS]
        times[name] = [_milliseconds(cost) for cost in found]
        yield _line(name, bytes_with_adam(name), ERRORS[name], map(_cell, found))
    measured = ADAMW_BF16.milliseconds * ADAMW_BF16.cores * PARAMETERS / ADAMW_BF16.elements
    yield (
        f"\nCalibration: AWS measured {measured:.0f} ms on trn2 with its own fused AdamW, of bf16 states. The "
        "bandwidth\nof the estimates is taken from that time, so bf16 on trn2 has it again: it does not confirm them."
    )
    yield _conclusion(times)
    yield FOOT


def _line(strategy: str, size: object, errors: Iterable[str], cells: Iterable[str]) -> str:
    columns = [f"{strategy:<17}{size:>6}", *(f"{e:>13}" for e in errors), "", *(f"{c:<21}" for c in cells)]
    return " ".join(columns).rstrip()


def _milliseconds(cost: Estimate) -> float:
    return cost.whole * cost.memory * PARAMETERS / PARTITIONS / 1e6


def _cell(cost: Estimate) -> str:
    slower = max(cost.times.values()) / cost.transfer
    return f"{_milliseconds(cost):5.0f} ({'memory' if slower <= 1 else f'{cost.bound}, {slower:.1f}'})"


def _conclusion(times: Mapping[str, Sequence[float]]) -> str:
    """How long steps take, compared with those of fp32 masters on the same target."""
    small = [name for name in times if bytes_with_adam(name) < bytes_with_adam(DEFAULT) and name.startswith("split")]

    def over(names: Iterable[str]) -> str:
        ratios = [a / b for name in names for a, b in zip(times[name], times["fp32"], strict=True)]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    return (
        f"Conclusion: a step of {DEFAULT}, the default, should take {over([DEFAULT])} times as long as one of fp32, of "
        f"plus\n{over(['plus'])} times, and of the split strategies with fewer bytes {over(small)} times."
    )


def has_marks(path: Path) -> bool:
    """Returns True for a document into which tables can be put."""
    return path.is_file() and f"{BEGIN}\n" in path.read_text()


def put_into(path: Path, table: str) -> str:
    """Replaces the table in a document; returns what was done."""
    before, rest = path.read_text().split(f"{BEGIN}\n")
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return f"wrote the costs into {path}"


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
