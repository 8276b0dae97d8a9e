"""The page of a report: title, conclusion, a table of the runs, and cards with the charts."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from collage_neuron.cli import charts, module_maps
from collage_neuron.cli.conclusion import conclusion, title
from collage_neuron.cli.html_page import Card, document, table
from collage_neuron.monitoring.run_log import Line, Log

Cell = tuple[str, Callable[[Log], str]]

MAP_NOTE = (
    "|1 - EDQ / ||raw update|| |, how far EDQ is from 1, where nothing is lost: dark is lossless, bright is lost; grey "
    "was not measured"
)

ABOVE_NOTE = "minus the loss of the run of fp32 at the same step, a running mean; in the grey band the axis is linear"

TABLE_NOTE = (
    "EDQ (effective descent quality): the share of the wanted update that arrives, 1 if all does. Lost updates: "
    "those that were not zero and changed no bit of the weight; lost, bf16 word: those that did not change the "
    "bf16 number of the weight, with which the model computes; what they add is kept in its other number, if it "
    "has one. Stalled: elements of a state that should have become smaller and stayed as they were stored. All "
    "are means over the measured steps; docs/monitor.md explains them. In a chart, a click on a name in the "
    "legend hides its lines, a double click all others; drag to zoom, double-click to return."
)


def last(key: str, form: str) -> Callable[[Log], str]:
    """A column: the last value that a run logged under `key`."""

    def show(log: Log) -> str:
        _, values = log.series(lambda record: record[key])
        return form.format(values[-1]) if values else ""

    return show


def mean(value: Callable[[Line], Any], form: str) -> Callable[[Log], str]:
    """A column: the mean over the measured steps."""

    def show(log: Log) -> str:
        _, values = log.series(value)
        return form.format(fmean(values)) if values else ""

    return show


def about(key: str) -> Callable[[Log], str]:
    """A column: an entry of the description of the run."""
    return lambda log: _shown(log.about.get(key, ""))


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


SUMMARY: tuple[Cell, ...] = (
    ("run", lambda log: log.name),
    ("strategy", about("strategy")),
    ("bytes per parameter", about("bytes_per_parameter")),
    ("learning rate", about("lr")),
    ("seed", about("seed")),
    ("measured steps", lambda log: f"{len(log.records)}, {log.steps[0]} to {log.steps[-1]}"),
    ("last loss", last("loss", "{:.4f}")),
    ("EDQ", mean(lambda r: r["total"]["pair"]["ratio"], "{:.4f}")),
    ("EDQ, bf16 word", mean(lambda r: r["total"]["high"]["ratio"], "{:.4f}")),
    ("lost updates", mean(lambda r: r["total"]["pair"]["lost"], "{:.2f} %")),
    ("lost, bf16 word", mean(lambda r: r["total"]["high"]["lost"], "{:.2f} %")),
    ("stalled", lambda log: _stalled(log)),
)


def _stalled(log: Log) -> str:
    names = dict.fromkeys(name for record in log.records for name in record.get("total", {}).get("stalled", {}))
    cells = {name: mean(partial(charts.stalled, name), "{:.1f} %")(log) for name in names}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)


def page(logs: Sequence[Log]) -> str:
    """The report as HTML. Raises ModuleNotFoundError if plotly is not installed."""
    cut = [f"<p class=note>{html.escape(log.name)}: the last line is cut off; the run was killed there.</p>"
           for log in logs if log.truncated]  # fmt: skip
    body = f"{_table(logs)}<p class=note>{TABLE_NOTE}</p>{_versions(logs)}{''.join(cut)}"
    return document(title(logs), [conclusion(logs)], body, [list(_curves(logs)), list(_maps(logs))], "report")


def _versions(logs: Sequence[Log]) -> str:
    """What ran, once for the runs that are alike."""
    ran: dict[str, list[str]] = {}
    for log in logs:
        versions = log.about.get("versions", {})
        known = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, dict) else []
        backend = [f"backend {log.about['backend']}"] if "backend" in log.about else []
        ran.setdefault(", ".join([*known, *backend]), []).append(log.name)
    said = [text if len(ran) == 1 else f"{', '.join(names)}: {text}" for text, names in ran.items() if text]
    return "".join(f"<p class=note>{html.escape(text)}</p>" for text in said)


def _curves(logs: Sequence[Log]) -> Iterator[Card]:
    if figure := charts.above_fp32(logs):
        yield "Loss above fp32", ABOVE_NOTE, figure
    for chart in (*charts.CHARTS, *charts.stall_charts(logs), *charts.memory_charts(logs)):
        if figure := charts.line_chart(chart, logs):
            yield chart.title, chart.note, figure


def _maps(logs: Sequence[Log]) -> Iterator[Card]:
    for name, figure in module_maps.figures(logs):
        yield name, MAP_NOTE, figure


def _table(logs: Sequence[Log]) -> str:
    kept = [(name, show) for name, show in SUMMARY if any(show(log) for log in logs)]
    rows = [[show(log) for _, show in kept] for log in logs]
    return table([name for name, _ in kept], rows, charts.colours_of(logs))
