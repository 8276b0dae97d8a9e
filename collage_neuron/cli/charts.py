"""The charts of a report as data for plotly.js: measurements of several runs side by side, over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from collage_neuron.cli.palette import assigned
from collage_neuron.monitoring.run_log import Line, Log
from collage_neuron.monitoring.writers import flat

MEANING = (
    "EDQ (effective descent quality): the share of the wanted update that arrives, 1 if all does. Lost updates: those "
    "that were not zero and changed no bit of the weight"
)

BASELINES = ("bf16", "fp32", "fp32_states", "stochastic", "stochastic_states")
"""The strategies that others are compared with; they are drawn thin and on top, so that no line hides another."""

THIN, THICK = 1.5, (2.4, 4.0)
"""Widths of the lines of baselines, and of the thinnest and thickest others, in pixels."""

Figure = dict[str, Any]
"""`data` and `layout` of plotly.js. report.js adds colours: `meta` of a line names its colour in the palette."""


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


LINEAR = 1e-3
"""Up to here, in nats, the axis of losses above fp32 is linear; beyond, logarithmic."""
SMOOTHED = 20
"""Differences of losses are running means over the last one of so many parts of the run."""


def squeezed(value: float) -> float:
    """A place on an axis that is linear near 0 and logarithmic beyond LINEAR, on both sides."""
    return math.copysign(min(abs(value) / LINEAR, 1) + math.log10(max(abs(value) / LINEAR, 1)), value)


def squeezed_axis(title: str) -> dict[str, Any]:
    """The layout of a chart with such an axis, whose linear part is grey."""
    ticks = [sign * 10.0**k for sign in (-1, 1) for k in range(-3, 2)] + [0.0]
    band = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": squeezed(-LINEAR), "y1": squeezed(LINEAR)}
    names = [f"{tick:+g}" if tick else "0" for tick in ticks]
    return {
        "shapes": [band | {"fillcolor": "rgba(128,128,128,.15)", "line": {"width": 0}, "layer": "below"}],
        "yaxis": {"title": {"text": title}, "tickvals": [squeezed(tick) for tick in ticks], "ticktext": names},
    }


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
    Lines(
        "Worst operand of an fp8 matmul",
        lambda r: 100 * max(x["vanished"] for x in r["fp8"].values()),
        "per cent",
        lambda r: 100 * max(x["saturated"] for x in r["fp8"].values()),
        "elements that became 0 (solid) or squares lost to saturation (dashed), of the operand that lost most",
        shows=(0,),
    ),
    Lines("Size of the raw update", lambda r: r["total"]["raw_norm"], "norm", scale="log"),
)


def line_chart(chart: Lines, logs: Sequence[Log]) -> Figure | None:
    """The chart; None if no run has the number."""
    colours = colours_of(logs)
    traces = [t for log, c in zip(logs, colours, strict=True) for t in _traces(chart, c, log, _width(log, logs))]
    if not any(trace["showlegend"] for trace in traces):
        return None
    traces.sort(key=lambda trace: -trace["line"]["width"])  # thin lines last, over the thick ones
    axes = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": chart.label}, "type": chart.scale, **_range(chart, traces)},
    }
    return {"data": traces, "layout": {"showlegend": len(logs) > 1, "hovermode": "x unified", **axes}}


def above_fp32(logs: Sequence[Log], steps: str = "step") -> Figure | None:
    """The loss of runs minus that of fp32 from the same seed, at the same step; None if no run has an fp32 beside it.

    Runs of one name are one line, their mean, in a region of one standard deviation to each side.
    """
    losses = [dict(zip(*log.series(lambda record: record["loss"]), strict=True)) for log in logs]
    controls = {log.about.get("seed"): i for i, log in reversed(list(enumerate(logs))) if _strategy(log) == "fp32"}
    names = list(dict.fromkeys(log.name for log in logs))
    named = [[i for i, log in enumerate(logs) if log.name == name] for name in names]
    traces: list[dict[str, Any]] = []
    for own, colour in zip(named, colours_of([logs[own[0]] for own in named]), strict=True):
        beside = ((i, controls.get(logs[i].about.get("seed"), i)) for i in own)
        curves = [_running_difference(losses[i], losses[control]) for i, control in beside if i != control]
        traces += _with_spread(logs[own[0]].name, colour, [curve for curve in curves if curve])
    layout = {**squeezed_axis("loss above fp32"), "xaxis": {"title": {"text": steps}}, "showlegend": True}
    return {"data": traces, "layout": layout} if traces else None


def _running_difference(losses: Mapping[int, float], control: Mapping[int, float]) -> dict[int, float]:
    """By step the mean difference over the last SMOOTHED-th of the run."""
    steps = [step for step in losses if step in control]
    apart = [losses[step] - control[step] for step in steps]
    width = max(1, len(apart) // SMOOTHED)  # single batches differ by more than strategies do
    return {step: fmean(apart[max(0, end - width) : end]) for end, step in enumerate(steps, 1)}


def _with_spread(name: str, colour: str, curves: Sequence[Mapping[int, float]]) -> Iterator[dict[str, Any]]:
    """The mean of several curves, and before it the region of their spread, if there is one."""
    steps = [step for step in curves[0] if all(step in curve for curve in curves)] if curves else []
    if not steps:
        return
    rows = [[curve[step] for curve in curves] for step in steps]
    means, common = list(map(fmean, rows)), {"type": "scatter", "mode": "lines", "name": name, "meta": colour}
    if len(curves) > 1:
        up = [squeezed(mean + stdev(row)) for mean, row in zip(means, rows, strict=True)]
        down = [squeezed(mean - stdev(row)) for mean, row in zip(means, rows, strict=True)]
        shade = {"fill": "toself", "opacity": 0.2, "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        outline = {"x": [*steps, *reversed(steps)], "y": [round(y, 4) for y in (*up, *reversed(down))]}
        yield common | shade | outline | {"legendgroup": name}  # a click on the legend hides both
    yield common | {
        "x": steps, "y": [round(squeezed(mean), 4) for mean in means], "text": [f"{mean:+.5f}" for mean in means],
        "hovertemplate": f"{name} %{{text}} at %{{x}}<extra></extra>", "legendgroup": name,
        "line": {"width": THICK[0]},
    }  # fmt: skip


def colours_of(logs: Sequence[Log]) -> list[str]:
    """What the palette calls the colour of each run."""
    return assigned([_strategy(log) for log in logs])


def _traces(chart: Lines, colour: str, log: Log, width: float) -> Iterator[dict[str, Any]]:
    main = log.series(chart.value)
    beside = log.series(chart.dashed) if chart.dashed else ([], [])
    if beside == main:  # a run without low words
        beside = [], []
    for (steps, values), name, dash, drawn in (
        (main, log.name, "solid", width),
        (beside, f"{log.name}, bf16 word alone", "dash", THIN),
    ):
        if steps:
            yield {
                "type": "scatter",
                "mode": "lines+markers" if len(steps) == 1 else "lines",
                "name": name,
                "x": steps,
                # Finer than a pixel, and half as many characters in the page.
                "y": [float(f"{value:.5g}") for value in values],
                "line": {"width": drawn, "dash": dash},
                "meta": colour,
                "legendgroup": colour,  # a click on the legend hides a run's dashed line, too
                "showlegend": dash == "solid",
            }


def is_baseline(log: Log) -> bool:
    """Returns True if the run's strategy is one that others are compared with."""
    return _strategy(log) in BASELINES


def _strategy(log: Log) -> object:
    return log.about.get("strategy")


def _width(log: Log, logs: Sequence[Log]) -> float:
    """The width of a run's line: later ones are thinner, so that one that lies under another is seen."""
    if is_baseline(log):
        return THIN
    compensated = [other for other in logs if not is_baseline(other)]
    thin, thick = THICK
    return thick - (thick - thin) * compensated.index(log) / max(1, len(compensated) - 1)


def _range(chart: Lines, traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The range of the axis, where the chart asks for one."""
    if not (chart.limits or chart.shows):
        return {}
    values = [*chart.shows, *(y for trace in traces for y in trace["y"])]
    low, high = min(values), max(values)
    space = 0.05 * (high - low) or 0.05
    # The ends stay off the frame, where a line would be hidden.
    low, high = low - space, high + space
    if chart.limits:
        low, high = max(low, chart.limits[0]), min(high, chart.limits[1])
    return {"range": [low, high]}


def stall_charts(logs: Sequence[Log]) -> Iterator[Lines]:
    """One chart per state whose stalled elements were measured."""
    note = "elements that should have become smaller and are stored as they were"
    for state in _keys(logs, lambda r: r.get("total", {}).get("stalled", {})):
        yield Lines(f"Stalled: {state}", stalled(state), "per cent of them", note=note, shows=(0, 100))


def stalled(state: str) -> Callable[[Line], Any]:
    """A function that reads the stalled elements of a state, in per cent, from a record."""
    return lambda record: record["total"]["stalled"][state]


def memory_charts(logs: Sequence[Log]) -> Iterator[Lines]:
    """One chart per kind of memory that was logged."""
    for title in _keys(logs, memory):
        yield Lines(title, lambda record, title=title: memory(record)[title], "MiB", shows=(0,))  # type: ignore[misc]


def memory(record: Line) -> dict[str, float]:
    """The logged memory in MiB, by the title of its chart; it was logged as one number or by kind."""
    logged = flat("", {"": record.get("memory", {})})
    known = {kind.lstrip("/"): x / 2**20 for kind, x in logged if isinstance(x, (int, float))}
    return {f"Memory: {kind}" if kind else "Memory": x for kind, x in known.items()}


def _keys(logs: Sequence[Log], of: Callable[[Line], dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for log in logs for record in log.records for key in of(record)))


# How much of the update arrives in each module, over the steps

COLUMNS = 300
"""Maximal number of cells along the steps; if there are more steps, neighbours are averaged."""
FLOOR = 1e-6
"""The smallest distance of EDQ from 1 that a map shows; anything closer has the same colour as 1."""
INFERNO = ("#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4")
"""The colours of matplotlib's inferno in five steps, which plotly.js does not know by name."""
LONGEST = 30
"""Characters of a module's name beside a map, of which the end is kept; the hover text has all of them."""


def module_maps(logs: Sequence[Log]) -> Iterator[tuple[str, Figure]]:
    """The map of each run that logged its modules, with its title; all have the same modules, in the same order."""
    runs = [log for log in logs if any(record.get("modules") for record in log.records)]
    modules = _keys(runs, lambda record: record.get("modules", {}))
    names = labels(logs, modules)
    yield from ((f"EDQ by module: {log.name}", heat_map(log, modules, names)) for log in runs)


def _cell(module: str, records: Sequence[Line]) -> float | None:
    ratios = [record["modules"].get(module, {}).get("pair", {}).get("ratio") for record in records]
    known = [max(FLOOR, abs(1 - ratio)) for ratio in ratios if isinstance(ratio, (int, float))]
    return fmean(known) if known else None


def labels(logs: Sequence[Log], modules: Sequence[str]) -> list[str]:
    """Names to show: where a name is a bare number, what it is stands behind it, as `0 (Linear)`."""
    kinds = {name: kind for log in logs for name, kind in log.about.get("module_kinds", {}).items()}
    return [f"{name} ({kinds[name]})" if name in kinds else name for name in modules]


def heat_map(log: Log, modules: Sequence[str], names: Sequence[str]) -> Figure:
    """|1 - EDQ / ||raw update|| |, on the scale that all maps share: dark is lossless, bright is lost."""
    records = [record for record in log.records if record.get("modules")]
    # More cells than pixels would make the page large, and the picture no better.
    size = math.ceil(len(records) / COLUMNS)
    columns = [records[i : i + size] for i in range(0, len(records), size)]
    cells = [[_cell(name, column) for column in columns] for name in modules]
    place = list(range(len(names)))
    trace = {
        "type": "heatmap",
        "x": [column[0]["step"] for column in columns],
        "y": place,
        "z": [[None if x is None else round(math.log10(x), 3) for x in row] for row in cells],
        "text": [[None if x is None else f"{x:.2g}" for x in row] for row in cells],
        "customdata": [[name] * len(columns) for name in names],
        "hovertemplate": "%{customdata}<br>step %{x}: |1 - EDQ| = %{text}<extra></extra>",
        "hoverongaps": False,
        "zmin": math.log10(FLOOR),
        "zmax": 0,
        "colorscale": [[place / 5, colour] for place, colour in enumerate(INFERNO)],
        "colorbar": {
            "tickvals": [-6, -4, -2, 0], "ticktext": ["1e-6", "1e-4", "0.01", "1"], "thickness": 12,
            "orientation": "h", "x": 0.5, "y": 1, "yref": "container", "yanchor": "top",
        },
    }  # fmt: skip
    every = math.ceil(len(names) / 60)
    ticks = {"tickvals": place[::every], "ticktext": [_short(name) for name in names[::every]]}
    return {
        "data": [trace],
        "layout": {
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"autorange": "reversed", "showgrid": False, **ticks},
            "margin": {"l": 10, "r": 12, "t": 40, "b": 10},
            "height": 138 + 17 * max(4, min(60, len(names))),
        },
    }


def _short(name: str) -> str:
    """The end of a name that is too long, from a dot on if there is one."""
    end = name[-LONGEST + 1 :]
    return name if len(name) <= LONGEST else "…" + end[end.find(".") + 1 :]
