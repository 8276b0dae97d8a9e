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

MAP_NOTE = "how far EDQ is from 1, where nothing is lost: dark is lossless, bright is lost; grey was not measured"


TABLE_NOTE = (
    "EDQ, lost and stalled in the table are means over the measured steps. In a chart, a click on a name in the legend "
    "hides its lines, a double click all others; drag to zoom, double-click to return."
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
    ("bytes a parameter", about("bytes_per_parameter")),
    ("measured steps", lambda log: f"{len(log.records)}, {log.steps[0]} to {log.steps[-1]}"),
    ("last loss", last("loss", "{:.4f}")),
    ("EDQ", mean(lambda r: r["total"]["pair"]["ratio"], "{:.4f}")),
    ("EDQ of hi", mean(lambda r: r["total"]["high"]["ratio"], "{:.4f}")),
    ("lost", mean(lambda r: r["total"]["pair"]["lost"], "{:.2f} %")),
    ("lost by hi", mean(lambda r: r["total"]["high"]["lost"], "{:.2f} %")),
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
    body = f"{_table(logs)}<p class=note>{TABLE_NOTE}</p>{''.join(cut)}"
    return document(title(logs), [conclusion(logs)], body, [list(_curves(logs)), list(_maps(logs))], "report")


def _curves(logs: Sequence[Log]) -> Iterator[Card]:
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
