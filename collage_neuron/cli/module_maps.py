"""Maps of a report: how much of the update arrives in each module, over the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from collage_neuron.cli.charts import Figure
from collage_neuron.monitoring.run_log import Line, Log

COLUMNS = 300
"""Maximal number of cells along the steps; if there are more steps, neighbours are averaged."""
FLOOR = 1e-6
"""The smallest distance of EDQ from 1 that a map shows; anything closer has the same colour as 1."""
INFERNO = ("#000004", "#420a68", "#932667", "#dd513a", "#fca50a", "#fcffa4")
"""The colours of matplotlib's inferno in five steps, which plotly.js does not know by name."""
LONGEST = 30
"""Characters of a module's name beside a map, of which the end is kept; the hover text has all of them."""


def figures(logs: Sequence[Log]) -> Iterator[tuple[str, Figure]]:
    """The map of each run that logged its modules, with its title; all have the same modules, in the same order."""
    runs = [log for log in logs if any(record.get("modules") for record in log.records)]
    modules = list(dict.fromkeys(name for log in runs for record in log.records for name in record.get("modules", {})))
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
