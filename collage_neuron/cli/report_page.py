"""The page of a report: title, conclusion, a table of the runs, and cards with the charts, all in one HTML file."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from statistics import fmean
from typing import Any

from collage_neuron.cli import charts, module_maps
from collage_neuron.cli.conclusion import conclusion, title
from collage_neuron.monitoring.run_log import Line, Log

Cell = tuple[str, Callable[[Log], str]]

Card = tuple[str, str, charts.Figure]
"""Title, note and figure."""

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
    drawn = list(_cards(logs))
    heading = html.escape(title(logs))
    cut = [f"<p class=note>{html.escape(log.name)}: the last line is cut off; the run was killed there.</p>"
           for log in logs if log.truncated]  # fmt: skip
    means = f"<p class=note>{TABLE_NOTE}</p>"
    sections = "".join(_section(f"chart{i}", card) for i, card in enumerate(drawn))
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{heading}</title><style>{_file('report.css')}</style></head><body><h1>{heading}</h1>"
        f"<p class=conclusion>{html.escape(conclusion(logs))}</p>{_table(logs)}{means}{''.join(cut)}"
        f"<noscript><p>The charts need JavaScript.</p></noscript><div class=cards>{sections}</div>"
        "<p class=note>Written by python -m collage_neuron report.</p>"
        f"{_scripts({f'chart{i}': figure for i, (_, _, figure) in enumerate(drawn)})}</body></html>\n"
    )


def _cards(logs: Sequence[Log]) -> Iterator[Card]:
    for chart in (*charts.CHARTS, *charts.stall_charts(logs), *charts.memory_charts(logs)):
        if figure := charts.line_chart(chart, logs):
            yield chart.title, chart.note, figure
    for name, figure in module_maps.figures(logs):
        yield name, MAP_NOTE, figure


def _table(logs: Sequence[Log]) -> str:
    kept = [(name, show) for name, show in SUMMARY if any(show(log) for log in logs)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name, _ in kept)
    rows = "".join(_row(kept, log, i % charts.COLOURS) for i, log in enumerate(logs))
    return f"<div class=scrolls><table><tr>{head}</tr>{rows}</table></div>"


def _row(cells: Sequence[Cell], log: Log, colour: int) -> str:
    first, *others = (html.escape(show(log)) for _, show in cells)
    return f"<tr><td class=swatch><i style='background:var(--run{colour})'></i>{first}</td>" + "".join(
        f"<td>{cell}</td>" for cell in others
    ) + "</tr>"  # fmt: skip


def _section(name: str, card: Card) -> str:
    heading, note, _ = card
    said = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(heading)}</h2>{said}<div class=chart id={name}></div></section>"


def _scripts(figures: dict[str, charts.Figure]) -> str:
    """plotly.js itself, so that the page needs no network, then the figures, then what draws them."""
    from plotly.offline import get_plotlyjs  # an extra: imported only where a page is written

    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")  # a name may hold </script>
    drawing = _file("report.js")
    return (
        f"<script>{get_plotlyjs()}</script><script type='application/json' id=figures>{data}</script>"
        f"<script>{drawing}</script>"
    )


def _file(name: str) -> str:
    return files("collage_neuron.cli").joinpath(name).read_text(encoding="utf-8")
