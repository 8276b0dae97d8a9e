"""What a step costs on Trainium under each strategy, or with each format, in Markdown: estimates, not measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.nki.bodies import Work, time_of
from collage_neuron.passes.backends.nki.cost import CALIBRATED, DOUBTS, Estimate, Figures, estimate
from collage_neuron.passes.backends.nki.cut import Cut
from collage_neuron.passes.backends.nki.hardware import ENGINES, PARTITIONS, TARGETS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki, reason_against
from collage_neuron.passes.ir.update import Update

TITLES = (
    "target",
    "bytes",
    *(f"{e}: instructions, ns" for e in ENGINES),
    "DMA ns",
    "bound by",
    "ratio",
    "calibrated",
    "looped",
)

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


def with_figures(kernel: Kernel, figures: Figures) -> Estimate:
    """What a kernel costs under other assumptions."""
    return estimate(kernel.plan, kernel.tiling, TARGETS[kernel.target], figures)


LONG, TURN = 4096, 16
"""Tiles of the tensors, and of a turn of the loop over several of them, of which `looped` is."""


def looped(kernel: Kernel) -> float:
    """The calibrated time of long tensors in a loop of the newer dialect, over their DMAs' at documented bandwidth."""
    columns, total = kernel.tiling.columns, LONG * PARTITIONS * kernel.tiling.columns
    cut = Cut(columns, kernel.tiling.chunk, columns if kernel.has_blocks else 0)
    work = Work(kernel.in_dialect("nki"), total, cut, TURN)
    return time_of(work) / (LONG * columns * kernel.cost.memory)


def doubts(update_of: Callable[[str], Update], names: Iterable[str], targets: Iterable[str] = TARGETS) -> str:
    """What the calibrated ratio of each strategy becomes with each doubtful figure, in Markdown."""
    rows = [_doubts(name, lowered(update_of(name), t)) for name in names for t in targets]
    return markdown(("strategy", "target", "calibrated", *DOUBTS), rows)


def _doubts(name: str, kernel: Kernel) -> list[str]:
    ranges = ([f"{with_figures(kernel, f).whole:.2f}" for f in ends] for ends in DOUBTS.values())
    ratio = f"{with_figures(kernel, CALIBRATED).whole:.2f}"
    return [f"`{name}`", kernel.target, ratio, *("-" if a == b else f"{a} to {b}" for a, b in ranges)]


def _cells(kernel: Kernel) -> Iterator[str]:
    cost, clock = kernel.cost, TARGETS[kernel.target].clock
    yield f"{cost.read} + {cost.written}"
    for e in ENGINES:
        time = cost.times["scalar"] if e == "scalar" else cost.cycles[e] / clock[e]
        yield f"{cost.instructions[e]}, {time:.1f}"
    yield f"{cost.memory:.1f}"
    yield cost.bound
    yield f"{cost.ratio:.2f}"
    yield f"{with_figures(kernel, CALIBRATED).whole:.2f}"
    yield f"{looped(kernel):.2f}"


def put_into(path: Path, table: str) -> str:
    """Replaces the table in a document; returns what was done."""
    before, rest = path.read_text().split(f"{BEGIN}\n")
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}")
    return f"wrote the costs into {path}"
