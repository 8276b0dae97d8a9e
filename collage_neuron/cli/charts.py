"""The charts of a report as figures of plotly: measurements of several runs side by side, over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from collage_neuron.cli.palette import assigned
from collage_neuron.monitoring.run_log import Line, Log
from collage_neuron.monitoring.writers import flat

MEANING = (
    "EDQ (effective descent quality): the share of the wanted update that arrives, 1 if all does. Lost updates: those "
    "that were not zero and changed no bit of the weight"
)

Figure = dict[str, Any]
"""`data` and `layout` of plotly."""


class Chart(NamedTuple):
    """A chart of one number over the steps, one line per run; `dashed` is a second number of the same runs."""

    title: str
    label: str
    value: Callable[[Line], Any]
    dashed: Callable[[Line], Any] | None = None
    note: str = ""
    axis: Mapping[str, Any] = {}
    """Further properties of the vertical axis."""


def edq(of: str) -> Callable[[Line], Any]:
    """A function that reads EDQ / ||raw update|| of the `pair` or of the `high` word from a record."""
    return lambda record: record["total"][of]["ratio"]


def lost(of: str) -> Callable[[Line], Any]:
    """A function that reads lost updates, in per cent, of the `pair` or of the `high` word from a record."""
    return lambda record: record["total"][of]["lost"]


def stalled(state: str) -> Callable[[Line], Any]:
    """A function that reads the stalled elements of a state, in per cent, from a record."""
    return lambda record: record["total"]["stalled"][state]


# A step with a tiny update may have an EDQ far outside; a tenth of a per cent is not to look large.
RATIO = {"autorangeoptions": {"clipmin": -0.05, "clipmax": 1.25}}
PER_CENT = {"autorangeoptions": {"include": [0, 100]}}

CHARTS = (
    Chart("Loss", "loss", lambda r: r["loss"]),
    Chart(
        "Effective descent quality",
        "EDQ / ||raw update||",
        edq("pair"),
        edq("high"),
        "solid: of the value that is kept (hi + lo, or a master weight); dashed: of its bf16 word alone",
        RATIO,
    ),
    Chart(
        "Lost updates",
        "per cent",
        lost("pair"),
        lost("high"),
        "updates that are not zero and change nothing; solid: of the kept value, dashed: of its bf16 word alone",
        PER_CENT,
    ),
    Chart(
        "Worst operand of an fp8 matmul",
        "per cent",
        lambda r: 100 * max(x["vanished"] for x in r["fp8"].values()),
        lambda r: 100 * max(x["saturated"] for x in r["fp8"].values()),
        "elements that became 0 (solid) or squares lost to saturation (dashed), of the operand that lost most",
    ),
    Chart("Size of the raw update", "norm", lambda r: r["total"]["raw_norm"], axis={"type": "log"}),
)


def charts_of(logs: Sequence[Log]) -> Iterator[Chart]:
    """The charts of what runs have logged, one for each state that may stall and each kind of memory among them."""
    yield from CHARTS
    note = "elements that should have become smaller and are stored as they were"
    for state in _keys(logs, lambda r: r.get("total", {}).get("stalled", {})):
        yield Chart(f"Stalled: {state}", "per cent of them", stalled(state), note=note, axis=PER_CENT)
    for kind in _keys(logs, _memory):
        # mypy infers no lambda that binds a name of the loop.
        yield Chart(kind, "MiB", lambda r, kind=kind: _memory(r)[kind], axis={"rangemode": "tozero"})  # type: ignore[misc]


def _keys(logs: Sequence[Log], of: Callable[[Line], Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for log in logs for record in log.records for key in of(record)))


def _memory(record: Line) -> dict[str, float]:
    """The logged memory in MiB, by the title of its chart; it was logged as one number or by kind."""
    logged = flat("Memory", {"": record.get("memory", {})})
    return {kind.rstrip("/").replace("//", ": "): x / 2**20 for kind, x in logged if isinstance(x, (int, float))}


def line_chart(chart: Chart, logs: Sequence[Log]) -> Figure | None:
    """The chart; None if no run has the number."""
    traces = [t for log, colour in zip(logs, colours_of(logs), strict=True) for t in _traces(chart, colour, log)]
    axis = {"title": {"text": chart.label}, **chart.axis}
    return _over_steps(traces, axis) if any(trace["showlegend"] for trace in traces) else None


def _over_steps(traces: list[dict[str, Any]], axis: Mapping[str, Any]) -> Figure:
    layout = {"hovermode": "x unified", "xaxis": {"title": {"text": "step"}}, "yaxis": axis, "height": 360}
    return {"data": traces, "layout": layout}


def _traces(chart: Chart, colour: str, log: Log) -> Iterator[dict[str, Any]]:
    main, beside = log.series(chart.value), log.series(chart.dashed) if chart.dashed else ([], [])
    if main[0]:
        yield _line(*main, log.name, colour)
    if beside[0] and beside != main:  # else a run without low words
        yield _line(*beside, f"{log.name}, bf16 word alone", colour, "dash", log.name)


def _line(
    steps: Sequence[int], values: Sequence[float], name: str, colour: str, dash: str = "solid", of: str = ""
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers" if len(steps) == 1 else "lines", "name": name, "x": steps,
        # Finer than a pixel, and half as many characters in the page.
        "y": [float(f"{value:.5g}") for value in values],
        "line": {"dash": dash, "color": colour},
        # A click on the legend hides a run's dashed line, too.
        "legendgroup": of or name, "showlegend": not of,
    }  # fmt: skip


SMOOTHED = 20
"""Differences of losses are running means over the last one of so many parts of the run."""


def above_fp32(logs: Sequence[Log]) -> Figure | None:
    """The loss of runs minus that of fp32 from the same seed, at the same step; None if none has an fp32 beside it."""
    losses = [dict(zip(*log.series(lambda record: record["loss"]), strict=True)) for log in logs]
    controls = {log.about.get("seed"): i for i, log in enumerate(logs) if log.about.get("strategy") == "fp32"}
    traces: list[dict[str, Any]] = []
    for i, (log, colour) in enumerate(zip(logs, colours_of(logs), strict=True)):
        control = controls.get(log.about.get("seed"), i)
        steps = [step for step in losses[i] if step in losses[control] and i != control]
        apart = [losses[i][step] - losses[control][step] for step in steps]
        width = max(1, len(apart) // SMOOTHED)  # single batches differ by more than strategies do
        means = [fmean(apart[max(0, end - width) : end]) for end in range(1, len(apart) + 1)]
        traces += [_line(steps, means, log.name, colour)] if steps else []
    return _over_steps(traces, {"title": {"text": "loss above fp32"}}) if traces else None


def colours_of(logs: Sequence[Log]) -> list[str]:
    """The colour of each run."""
    return assigned([log.about.get("strategy") for log in logs])


# How much of the update arrives in each module, over the steps

COLUMNS = 300
"""About how many cells a map has along the steps; of more steps, some are left out."""
FLOOR = 1e-6
"""The smallest distance of EDQ from 1 that a map shows; anything closer has the same colour as 1."""


def module_maps(logs: Sequence[Log]) -> Iterator[tuple[str, Figure]]:
    """The map of each run that logged its modules, with its title; all have the same modules, in the same order."""
    modules = _keys(logs, lambda record: record.get("modules", {}))
    for log in logs:
        if records := [record for record in log.records if record.get("modules")]:
            yield f"EDQ by module: {log.name}", heat_map(records[:: math.ceil(len(records) / COLUMNS)], modules)


def heat_map(records: Sequence[Line], modules: Sequence[str]) -> Figure:
    """|1 - EDQ / ||raw update|| |, on the scale that all maps share: dark is lossless, bright is lost."""
    trace = {
        "type": "heatmap",
        "x": [record["step"] for record in records],
        "y": modules,
        "z": [[_cell(record["modules"].get(name, {})) for record in records] for name in modules],
        "hovertemplate": "%{y}<br>step %{x}: |1 - EDQ| = 10^%{z}<extra></extra>",
        "zmin": math.log10(FLOOR), "zmax": 0, "colorscale": "Inferno",
        "colorbar": {"tickvals": [-6, -4, -2, 0], "ticktext": ["1e-6", "1e-4", "0.01", "1"], "thickness": 12},
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "step"}}, "yaxis": {"autorange": "reversed", "type": "category"},
        "height": 138 + 17 * max(4, min(60, len(modules))),
    }  # fmt: skip
    return {"data": [trace], "layout": layout}


def _cell(measured: Line) -> float | None:
    ratio = measured.get("pair", {}).get("ratio")
    return round(math.log10(max(FLOOR, abs(1 - ratio))), 3) if isinstance(ratio, (int, float)) else None
