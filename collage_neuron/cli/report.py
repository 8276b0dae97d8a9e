"""`python -m collage_neuron report RUN...`: turns logs of runs into one self-contained HTML page."""

from __future__ import annotations

import argparse
import html
import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from collage_neuron.cli import charts
from collage_neuron.errors import LogError
from collage_neuron.monitoring.run_log import Line, Log, read_logs

Cell = tuple[str, Callable[[Log], str]]


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
    cells = {name: mean(partial(_stalled_of, name), "{:.1f} %")(log) for name in names}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)


def _stalled_of(name: str, record: Line) -> Any:
    return record["total"]["stalled"][name]


STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 2rem auto; max-width: 1180px;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 0 0 .2rem; }
p.note { color: #555; margin: 0 0 .4rem; font-size: .85rem; }
table { border-collapse: collapse; font-size: .85rem; margin: 1rem 0; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; } th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; } td.swatch { white-space: nowrap; }
.swatch i { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .5em; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(520px, 1fr)); gap: 1.2rem; }
section { border: 1px solid #e3e3e3; border-radius: 6px; padding: .8rem; overflow-x: auto; }
section svg { max-width: 100%; height: auto; } .wide { margin-top: 1.2rem; }
"""


def page(logs: Sequence[Log]) -> str:
    """The report as HTML."""
    kept = [(title, show) for title, show in SUMMARY if any(show(log) for log in logs)]
    head = "".join(f"<th>{html.escape(title)}</th>" for title, _ in kept)
    rows = "".join(_row(kept, log, charts.colour(i)) for i, log in enumerate(logs))
    drawn = [*charts.CHARTS, *charts.stall_charts(logs), *charts.memory_charts(logs)]
    sections = "".join(_section(c.title, c.note, charts.line_chart(c, logs)) for c in drawn)
    maps = charts.heat_maps(logs)
    note = "how far EDQ is from 1, where nothing is lost: dark is lossless, bright is lost; grey was not measured"
    heat = _section("Effective descent quality by module", note, charts.svg(maps) if maps else None, "wide")
    cut = [f"<p class=note>{html.escape(log.name)}: the last line is cut off; the run was killed there.</p>"
           for log in logs if log.truncated]  # fmt: skip
    names = ", ".join(log.name for log in logs)
    means = "<p class=note>EDQ, lost and stalled in the table are means over the measured steps.</p>"
    return (
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(names)}</title><style>{STYLE}</style>"
        f"<body><h1>{html.escape(names)}</h1><p class=note>Written by python -m collage_neuron report.</p>"
        f"<table><tr>{head}</tr>{rows}</table>{means}{''.join(cut)}<div class=charts>{sections}</div>{heat}"
        "</body></html>\n"
    )


def _row(cells: Sequence[Cell], log: Log, colour: str) -> str:
    first, *others = (html.escape(show(log)) for _, show in cells)
    return f"<tr><td class=swatch><i style='background:{colour}'></i>{first}</td>" + "".join(
        f"<td>{cell}</td>" for cell in others
    ) + "</tr>"  # fmt: skip


def _section(title: str, note: str, svg: str | None, kind: str = "") -> str:
    if svg is None:
        return ""
    said = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<section class='{kind}'><h2>{html.escape(title)}</h2>{said}{svg}</section>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `report`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's .jsonl log, or a folder of them")
    parser.add_argument("--out", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    add_map = "write the maps of EDQ by module as a picture too: .png, .svg or .pdf"
    parser.add_argument("--map", type=picture, metavar="FILE", help=add_map)


def picture(text: str) -> Path:
    """An argparse type: a file name with a picture format that matplotlib can write."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} is not a picture: name a file that ends in .png, .svg or .pdf")
    return path


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Writes the page, and the picture; returns the exit status."""
    try:
        logs = read_logs(options.runs, lambda error: print(f"report: left out: {error}", file=sys.stderr))
        files = {options.out: page(logs).encode()}
        if options.map is not None:
            files[options.map] = _map(logs, options.map.suffix[1:])
        for path, content in files.items():
            _write(path, content)
            print(f"report: {path}")
    except LogError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "numpy"):
            raise
        print("report: the charts need matplotlib; pip install 'collage_neuron[report]'", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"report: {error.filename} cannot be written ({error.strerror}); name another with --out or --map",
            file=sys.stderr,
        )
        return 2
    return 0


def _map(logs: Sequence[Log], form: str) -> bytes:
    figure, out = charts.heat_maps(logs), io.BytesIO()
    if figure is None:
        raise LogError("no run logged its modules, so there is no map of them; leave out --map")
    figure.savefig(out, format=form, dpi=100)
    return out.getvalue()


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically: on an error the old file stays."""
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(content)
        os.replace(half, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        half.unlink(missing_ok=True)
