"""The charts of a report: measurements of several runs side by side, drawn by matplotlib (extra `report`)."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from collage_neuron.monitoring.run_log import Line, Log
from collage_neuron.monitoring.writers import flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
COLUMNS = 300
"""Maximal number of cells of a heat map along the steps; if there are more steps, neighbours are averaged."""
FLOOR = 1e-6
"""The smallest distance of EDQ from 1 that a heat map shows; anything closer has the same colour as 1."""

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "collage_neuron",
}


@dataclass(frozen=True)
class Lines:
    """A chart of one number over the steps, one line per run; `dashed` is a second number of the same runs."""

    title: str
    value: Callable[[Line], Any]
    label: str
    dashed: Callable[[Line], Any] | None = None
    note: str = ""
    scale: str = "linear"
    limits: tuple[float, float] | None = None
    """The widest range of the axis: a step with a tiny update may have an EDQ far outside."""
    shows: tuple[float, ...] = ()
    """Values that the axis always includes, so that a tenth of a per cent does not look large."""


def edq(of: str) -> Callable[[Line], Any]:
    """A function that reads EDQ / ||raw update|| of the `pair` or of the `high` word from a record."""
    return lambda record: record["total"][of]["ratio"]


def lost(of: str) -> Callable[[Line], Any]:
    """A function that reads lost updates, in per cent, of the `pair` or of the `high` word from a record."""
    return lambda record: record["total"][of]["lost"]


CHARTS = (
    Lines("Loss", lambda r: r["loss"], "loss"),
    Lines(
        "Effective descent quality",
        edq("pair"),
        "EDQ / ||raw update||",
        edq("high"),
        "solid: of the value that is kept (hi + lo, or a master weight); dashed: of its bf16 word alone",
        limits=(-0.05, 1.25),
    ),
    Lines(
        "Lost updates",
        lost("pair"),
        "per cent",
        lost("high"),
        "updates that are not zero and change nothing; solid: of the kept value, dashed: of its bf16 word alone",
        shows=(0, 100),
    ),
    Lines("Size of the raw update", lambda r: r["total"]["raw_norm"], "norm", scale="log"),
)


def svg(figure: Figure) -> str:
    """The figure as an SVG element."""
    import matplotlib as mpl  # an extra: imported only where a chart is drawn

    text = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


def line_chart(chart: Lines, logs: Sequence[Log]) -> str | None:
    """The chart as SVG; None if no run has the number."""
    found = [(i, log, *log.series(chart.value)) for i, log in enumerate(logs)]
    if not any(steps for _, _, steps, _ in found):
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3), layout="constrained")
        axes = figure.subplots()
        for i, log, steps, values in found:
            if steps:
                # Later lines are thinner, so that one that lies under another is seen.
                width = 1.2 + 2 * (len(logs) - 1 - i) / len(logs)
                axes.plot(steps, values, color=colour(i), label=log.name, linewidth=width, **_mark(steps))
            if chart.dashed:
                below = log.series(chart.dashed)
                axes.plot(*below, "--", color=colour(i), linewidth=0.9, alpha=0.8, **_mark(below[0]))
        axes.set(xlabel="step", ylabel=chart.label, yscale=chart.scale)
        axes.update_datalim([(steps[0], y) for _, _, steps, _ in found if steps for y in chart.shows])
        axes.autoscale_view()
        if chart.limits:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, chart.limits[0]), min(high, chart.limits[1]))
        if len(logs) > 1:
            axes.legend()
        return svg(figure)


def _mark(steps: Sequence[int]) -> dict[str, Any]:
    return {"marker": "."} if len(steps) == 1 else {}


def colour(i: int) -> str:
    """The colour of the i-th run."""
    return COLOURS[i % len(COLOURS)]


def stall_charts(logs: Sequence[Log]) -> Iterator[Lines]:
    """One chart per state whose stalled elements were measured."""
    note = "elements that should have become smaller and are stored as they were"
    for state in _keys(logs, lambda r: r.get("total", {}).get("stalled", {})):
        yield Lines(f"Stalled: {state}", partial(stalled, state), "per cent of them", note=note, shows=(0, 100))


def stalled(state: str, record: Line) -> Any:
    """Stalled elements of a state in per cent."""
    return record["total"]["stalled"][state]


def memory_charts(logs: Sequence[Log]) -> Iterator[Lines]:
    """One chart per kind of memory that was logged."""
    for title in _keys(logs, memory):
        yield Lines(title, partial(_memory_of, title), "MiB", shows=(0,))


def _memory_of(title: str, record: Line) -> float:
    return memory(record)[title]


def memory(record: Line) -> dict[str, float]:
    """The logged memory in MiB, by the title of its chart; it was logged as one number or by kind."""
    logged = record.get("memory", {})
    values = dict(flat("", logged)) if isinstance(logged, Mapping) else {"": logged}
    known = {kind.lstrip("/"): x / 2**20 for kind, x in values.items() if isinstance(x, (int, float))}
    return {f"Memory: {kind}" if kind else "Memory": x for kind, x in known.items()}


def _keys(logs: Sequence[Log], of: Callable[[Line], dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for log in logs for record in log.records for key in of(record)))


def heat_maps(logs: Sequence[Log]) -> Figure | None:
    """One heat map per run, on one scale: the distance of EDQ from 1, modules by steps. None if no run has modules."""
    runs = [log for log in logs if any(record.get("modules") for record in log.records)]
    if not runs:
        return None
    modules = list(dict.fromkeys(name for log in runs for record in log.records for name in record.get("modules", {})))
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"axes.grid": False}):
        width, height = 2.2 + max(9, 3.4 * len(runs)), 1.1 + 0.17 * max(4, min(60, len(modules)))
        figure = Figure(figsize=(width, height), layout="constrained")
        row = figure.subplots(1, len(runs), squeeze=False, sharey=True)[0]
        for axes, log in zip(row, runs, strict=True):
            shown = _heat_map(axes, log, modules)
        every = math.ceil(len(modules) / 60)
        row[0].set_yticks(range(0, len(modules), every), modules[::every], fontsize=7)
        figure.colorbar(shown, ax=list(row), label="|1 - EDQ / ||raw update|| |", shrink=0.9)
        return figure


def _heat_map(axes: Axes, log: Log, modules: Sequence[str]) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    records = [record for record in log.records if record.get("modules")]
    lost = np.full((len(modules), len(records)), np.nan)
    for j, record in enumerate(records):
        for i, name in enumerate(modules):
            ratio = record["modules"].get(name, {}).get("pair", {}).get("ratio")
            if isinstance(ratio, (int, float)):
                lost[i, j] = max(FLOOR, abs(1 - ratio))
    groups = np.array_split(np.arange(len(records)), min(COLUMNS, len(records)))
    with np.errstate(all="ignore"):
        cells = np.stack([_mean(lost[:, group]) for group in groups], axis=1)
    first, last = records[0]["step"], records[-1]["step"]
    extent = (first - 0.5, last + 0.5, len(modules) - 0.5, -0.5)
    norm = LogNorm(FLOOR, 1)
    shown = axes.imshow(cells, aspect="auto", interpolation="nearest", norm=norm, cmap="inferno", extent=extent)
    axes.set(title=log.name, xlabel="step")
    axes.set_facecolor("0.85")  # not measured
    return shown


def _mean(columns: Any) -> Any:
    import numpy as np

    known = ~np.isnan(columns)
    return np.where(known.any(axis=1), np.nansum(columns, axis=1) / np.maximum(1, known.sum(axis=1)), np.nan)
