"""`python -m collage_neuron report RUN...`: turns logs of runs into one self-contained HTML page.

The page has a verdict for each run, a table of the runs, and the charts, which plotly writes.
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
from collage_neuron.errors import LogError
from collage_neuron.matmuls.advice import worst
from collage_neuron.monitoring.metrics import ADVICE
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
    except LogError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        print("report: the page needs plotly; pip install '.[report]'", file=sys.stderr)
        return 2
    except OSError as error:
        said = f"report: {options.out} cannot be written ({error.strerror}); name another with --out"
        print(said, file=sys.stderr)
        return 2
    print(f"wrote {options.out} ({len(content) / 1e6:.1f} MB): open it in a browser")
    print("\n".join(verdicts(logs)))
    return 0


def _write(path: Path, content: bytes) -> None:
    """Writes the file atomically: on an error the old file stays."""
    # Beside the file, since only a rename within a file system is atomic.
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        half.write_bytes(content)
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


# The page -------------------------------------------------------------------------------------------------------------

MAP_NOTE = (
    "|1 - EDQ / ||raw update|| |, how far EDQ is from 1, where nothing is lost: dark is lossless, bright is lost; "
    "white was not measured, or is NaN or Inf"
)

ABOVE_NOTE = "minus the loss of the run of fp32 from the same seed at the same step, a running mean"

TABLE_NOTE = (
    f"{charts.MEANING}; lost, bf16 word: those that did not change the bf16 number of the weight, with which the model "
    "computes; what they add is kept in its other number, if it has one. Stalled: elements of a state that should have "
    "become smaller and stayed as they were stored. All are means over the measured steps that were finite; "
    "docs/monitor.md explains them. In a chart, a click on a name in the legend hides its lines, a double click all "
    "others; drag to zoom, double-click to return."
)

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 1.5rem; }
h1 { font-size: 1.45rem; } h2 { font-size: 1.05rem; margin: 1rem 0 0; } p.note { color: #555; font-size: .85rem; }
div.scrolls { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd; }
div.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 600px), 1fr)); gap: 1rem; }
"""


def page(logs: Sequence[Log]) -> str:
    """The report as HTML, with all that it needs. Raises ModuleNotFoundError if plotly is not installed."""
    from plotly.io import to_html  # an extra: imported only where a page is written
    from plotly.offline import get_plotlyjs

    of = dict.fromkeys(str(log.about[key]) for key in ("model", "optimizer") for log in logs if key in log.about)
    title = html.escape(", ".join([*of, *(log.name for log in logs)]))
    cut = [f"{log.name}: the last line is cut off; the run was killed there." for log in logs if log.truncated]
    sections = (
        f"<section><h2>{html.escape(name)}</h2>{_note(note)}"
        # The library is in the page once.
        f"{to_html(figure, full_html=False, include_plotlyjs=False, default_height=figure['layout']['height'])}"
        "</section>"
        for name, note, figure in _figures(logs)
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        f"<title>{title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><h1>{title}</h1>"
        f"<pre>{html.escape(chr(10).join(verdicts(logs)))}</pre>{_table(logs)}{''.join(map(_note, [TABLE_NOTE, *cut]))}"
        f"<div class=cards>{''.join(sections)}</div></body></html>\n"
    )


def _note(text: str) -> str:
    return f"<p class=note>{html.escape(text)}</p>" if text else ""


def _figures(logs: Sequence[Log]) -> Iterator[tuple[str, str, charts.Figure]]:
    """Title, note and figure of each chart."""
    if figure := charts.above_fp32(logs):
        yield "Loss above fp32", ABOVE_NOTE, figure
    for chart in charts.charts_of(logs):
        if figure := charts.line_chart(chart, logs):
            yield chart.title, chart.note, figure
    yield from ((name, MAP_NOTE, figure) for name, figure in charts.module_maps(logs))


def column(value: Callable[[Line], Any], form: str) -> Callable[[Log], str]:
    """A column: the mean over the measured steps."""
    return lambda log: "" if (mean := _mean(log, value)) is None else form.format(mean)


def about(key: str) -> Callable[[Log], str]:
    """A column: an entry of the description of the run."""
    return lambda log: f"{value:g}" if isinstance(value := log.about.get(key, ""), float) else str(value)


SUMMARY: tuple[tuple[str, Callable[[Log], str]], ...] = (
    ("run", lambda log: log.name),
    *((key.replace("_", " "), about(key)) for key in ("strategy", "bytes_per_parameter", "lr", "seed")),
    ("measured steps", lambda log: f"{len(log.records)}, {log.steps[0]} to {log.steps[-1]}"),
    ("NaN or Inf", lambda log: _nonfinite(log)),
    ("last loss", lambda log: "" if (loss := final_loss(log)) is None else f"{loss:.4f}"),
    ("EDQ", column(charts.edq("pair"), "{:.4f}")),
    ("EDQ, bf16 word", column(charts.edq("high"), "{:.4f}")),
    ("lost updates", column(charts.lost("pair"), "{:.2f} %")),
    ("lost, bf16 word", column(charts.lost("high"), "{:.2f} %")),
    ("stalled", lambda log: _stalled(log)),
    ("backend", about("backend")),
    ("versions", lambda log: ", ".join(f"{name} {version}" for name, version in log.about.get("versions", {}).items())),
)


def _table(logs: Sequence[Log]) -> str:
    """The table of the runs, without columns that are empty; rows begin in the colour of their run."""
    filled = [(name, show) for name, show in SUMMARY if any(map(show, logs))]
    rows = [[f"<th>{name}" for name, _ in filled]]
    for log, colour in zip(logs, charts.colours_of(logs), strict=True):
        first, *others = (html.escape(show(log)) for _, show in filled)
        rows.append([f"<td style='border-left: .6em solid {colour}'>{first}", *(f"<td>{cell}" for cell in others)])
    return f"<div class=scrolls><table><tr>{'<tr>'.join(map(''.join, rows))}</table></div>"


def _nonfinite(log: Log) -> str:
    """Where the loss or the update was NaN or Inf; empty if nowhere."""
    steps = log.nonfinite
    return f"in {len(steps)} of {len(log.records)} measured steps, first in {steps[0]}" if steps else ""


def _stalled(log: Log) -> str:
    names = dict.fromkeys(name for record in log.records for name in record.get("total", {}).get("stalled", {}))
    cells = {name: column(charts.stalled(name), "{:.1f} %")(log) for name in names}
    return ", ".join(f"{name} {cell}" for name, cell in cells.items() if cell)


# What the runs show ---------------------------------------------------------------------------------------------------

NAMED = 0.1
"""Per cent of lost updates from which a verdict says that they are lost."""
ARRIVED = 0.01
"""Distance of EDQ from 1, where all arrives, from which a verdict says that updates are lost."""
SETTLED = 20
"""A final loss is the mean of the last one of so many measured steps: single batches are noisy."""


def final_loss(log: Log) -> float | None:
    """The mean loss of the last measured steps; None if there is none, or the run ends in NaN or Inf."""
    _, losses = log.series(lambda record: record["loss"])
    return fmean(losses[-max(1, len(losses) // SETTLED) :]) if losses and not log.broken else None


def verdicts(logs: Sequence[Log]) -> list[str]:
    """A line for each run in the order given: what arrived of its updates, and whether something is to be mended.

    Then what the last measurements of fp8 operands ask for.
    """
    rows = [_row(log) for log in logs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    each = [f"{line}: {_verdict(log)}" for line, log in zip(lines, logs, strict=True)]
    return [*each, *(f"In {log.name}, {said}." for log in logs if (said := _operands(log)))]


def _row(log: Log) -> list[str]:
    numbers = final_loss(log), _mean(log, charts.edq("pair")), _mean(log, charts.lost("pair"))
    forms = ("loss {:.4f}", "EDQ {:.4f}", "lost {:.2f} %")
    measured = ["" if x is None else form.format(x) for x, form in zip(numbers, forms, strict=True)]
    return [
        log.name,
        str(log.about.get("strategy", "")),
        *measured,
        f"NaN or Inf {_nonfinite(log)}" * bool(log.nonfinite),
    ]


def _verdict(log: Log) -> str:
    if log.broken:
        return ADVICE
    ratio, share = _mean(log, charts.edq("pair")), _mean(log, charts.lost("pair"))
    if ratio is None or share is None:
        return "what arrives of its updates was not measured"
    if abs(ratio - 1) < ARRIVED and (share < NAMED or _is_lost_late(log)):
        late = ": updates were lost at the end, where they are almost 0"
        return f"nothing to mend{late * (share >= NAMED)}"
    if log.about.get("strategy") == "fp32":
        return "fp32 loses them too: the updates are small beside the weights"
    return "updates are lost: a strategy with more bytes per parameter keeps more (docs/strategies.md)"


def _is_lost_late(log: Log) -> bool:
    """Returns True if most of what was lost was lost at the end, when updates had become small."""
    steps, values = log.series(charts.lost("pair"))
    _, norms = log.series(lambda record: record["total"]["raw_norm"])
    count = len(steps) // 5
    if not count or len(norms) != len(values):
        return False
    return sum(values[-count:]) > sum(values[:-count]) and fmean(norms[-count:]) < max(norms) / 10


def _operands(log: Log) -> str | None:
    measured: dict[str, dict[str, float | None]] = next((r["fp8"] for r in reversed(log.records) if r.get("fp8")), {})
    return worst({name: {k: x or 0.0 for k, x in numbers.items()} for name, numbers in measured.items()})


def _mean(log: Log, value: Callable[[Line], object]) -> float | None:
    _, values = log.series(value)
    return fmean(values) if values else None
