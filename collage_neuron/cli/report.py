"""`python -m collage_neuron report RUN...`: turns logs of runs into one self-contained HTML page.

The page has a title, a conclusion, a table of the runs, and cards with the charts.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from collage_neuron.cli import charts
from collage_neuron.cli.conclusion import conclusion, title, verdicts
from collage_neuron.cli.html_page import Card, document, table
from collage_neuron.errors import LogError
from collage_neuron.monitoring.run_log import Line, Log, read_logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's .jsonl log, or a folder of them")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Writes the page; returns the exit status."""
    try:
        logs = read_logs(options.runs, lambda error: print(f"report: left out: {error}", file=sys.stderr))
        content = page(logs).encode()
        _write(options.out, content)
        print(f"wrote {options.out} ({len(content) / 1e6:.1f} MB): open it in a browser")
        print("\n".join([*verdicts(logs), conclusion(logs)]))
    except LogError as error:
        print(f"report: {error}{_of_compare(options.runs)}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        print("report: the page needs plotly; pip install '.[report]'", file=sys.stderr)
        return 2
    except OSError as error:
        said = f"report: {error.filename} cannot be written ({error.strerror}); name another with --out"
        print(said, file=sys.stderr)
        return 2
    return 0


def _of_compare(given: Sequence[Path]) -> str:
    """What to say of folders that `compare` wrote."""
    pages = [path / "compare.html" for path in given if (path / "compare.html").is_file()]
    written = f"; the command compare writes a page of its own, here {pages[0]}" if pages else ""
    return f"{written}. A run writes a log with monitor(optimizer, model, to=JsonLog('runs/name.jsonl'))" * bool(pages)


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically: on an error the old file stays."""
    # Beside the file, since only a rename within a file system is atomic.
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(content)
        os.replace(half, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        half.unlink(missing_ok=True)


# The page -------------------------------------------------------------------------------------------------------------

Cell = tuple[str, Callable[[Log], str]]

MAP_NOTE = (
    "|1 - EDQ / ||raw update|| |, how far EDQ is from 1, where nothing is lost: dark is lossless, bright is lost; grey "
    "was not measured"
)

ABOVE_NOTE = "minus the loss of the run of fp32 at the same step, a running mean; in the grey band the axis is linear"

TABLE_NOTE = (
    f"{charts.MEANING}; lost, bf16 word: those that did not change the bf16 number of the weight, with which the model "
    "computes; what they add is kept in its other number, if it has one. Stalled: elements of a state that should have "
    "become smaller and stayed as they were stored. All are means over the measured steps; docs/monitor.md explains "
    "them. In a chart, a click on a name in the legend hides its lines, a double click all others; drag to zoom, "
    "double-click to return."
)


def column(value: Callable[[Line], Any], form: str, of: Callable[[list[float]], float] = fmean) -> Callable[[Log], str]:
    """A column: the mean over the measured steps, or what else becomes of the values."""

    def show(log: Log) -> str:
        _, values = log.series(value)
        return form.format(of(values)) if values else ""

    return show


def about(key: str) -> Callable[[Log], str]:
    """A column: an entry of the description of the run."""
    return lambda log: f"{value:g}" if isinstance(value := log.about.get(key, ""), float) else str(value)


SUMMARY: tuple[Cell, ...] = (
    ("run", lambda log: log.name),
    ("strategy", about("strategy")),
    ("bytes per parameter", about("bytes_per_parameter")),
    ("learning rate", about("lr")),
    ("seed", about("seed")),
    ("measured steps", lambda log: f"{len(log.records)}, {log.steps[0]} to {log.steps[-1]}"),
    ("last loss", column(lambda r: r["loss"], "{:.4f}", lambda values: values[-1])),
    ("EDQ", column(charts.edq("pair"), "{:.4f}")),
    ("EDQ, bf16 word", column(charts.edq("high"), "{:.4f}")),
    ("lost updates", column(charts.lost("pair"), "{:.2f} %")),
    ("lost, bf16 word", column(charts.lost("high"), "{:.2f} %")),
    ("stalled", lambda log: _stalled(log)),
)


def _stalled(log: Log) -> str:
    names = dict.fromkeys(name for record in log.records for name in record.get("total", {}).get("stalled", {}))
    cells = {name: column(charts.stalled(name), "{:.1f} %")(log) for name in names}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)


def page(logs: Sequence[Log]) -> str:
    """The report as HTML. Raises ModuleNotFoundError if plotly is not installed."""
    cut = [f"<p class=note>{html.escape(log.name)}: the last line is cut off; the run was killed there.</p>"
           for log in logs if log.truncated]  # fmt: skip
    maps = [(name, MAP_NOTE, figure) for name, figure in charts.module_maps(logs)]
    body = f"{_table(logs)}<p class=note>{TABLE_NOTE}</p>{_versions(logs)}{''.join(cut)}"
    return document(title(logs), [conclusion(logs)], body, [list(_curves(logs)), maps], "report")


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
    """The charts over the steps."""
    if figure := charts.above_fp32(logs):
        yield "Loss above fp32", ABOVE_NOTE, figure
    for chart in (*charts.CHARTS, *charts.stall_charts(logs), *charts.memory_charts(logs)):
        if figure := charts.line_chart(chart, logs):
            yield chart.title, chart.note, figure


def _table(logs: Sequence[Log]) -> str:
    filled = [(name, show) for name, show in SUMMARY if any(map(show, logs))]
    rows = [[show(log) for _, show in filled] for log in logs]
    return table([name for name, _ in filled], rows, charts.colours_of(logs))
