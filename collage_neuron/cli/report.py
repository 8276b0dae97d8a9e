"""`python -m collage_neuron report RUN...`: turns logs of runs into one self-contained HTML page.

The page has a title, a conclusion, a table of the runs, and cards with the charts.
"""

from __future__ import annotations

import argparse
import html
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

from collage_neuron.cli import charts
from collage_neuron.cli.html_page import Card, document, table
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
    "was not measured, or is NaN or Inf"
)

ABOVE_NOTE = "minus the loss of the run of fp32 at the same step, a running mean; in the grey band the axis is linear"

TABLE_NOTE = (
    f"{charts.MEANING}; lost, bf16 word: those that did not change the bf16 number of the weight, with which the model "
    "computes; what they add is kept in its other number, if it has one. Stalled: elements of a state that should have "
    "become smaller and stayed as they were stored. All are means over the measured steps that were finite; "
    "docs/monitor.md explains them. In a chart, a click on a name in the legend hides its lines, a double click all "
    "others; drag to zoom, double-click to return."
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


LOSS = itemgetter("loss")
LAST_LOSS = column(LOSS, "{:.4f}", lambda values: values[-1])

SUMMARY: tuple[Cell, ...] = (
    ("run", lambda log: log.name),
    ("strategy", about("strategy")),
    ("bytes per parameter", about("bytes_per_parameter")),
    ("learning rate", about("lr")),
    ("seed", about("seed")),
    ("measured steps", lambda log: f"{len(log.records)}, {log.steps[0]} to {log.steps[-1]}"),
    ("NaN or Inf", lambda log: _nonfinite(log)),
    ("last loss", lambda log: "" if log.broken else LAST_LOSS(log)),
    ("EDQ", column(charts.edq("pair"), "{:.4f}")),
    ("EDQ, bf16 word", column(charts.edq("high"), "{:.4f}")),
    ("lost updates", column(charts.lost("pair"), "{:.2f} %")),
    ("lost, bf16 word", column(charts.lost("high"), "{:.2f} %")),
    ("stalled", lambda log: _stalled(log)),
)


def _nonfinite(log: Log) -> str:
    """Where the loss or the update was NaN or Inf; empty if nowhere."""
    steps = log.nonfinite
    return f"in {len(steps)} of {len(log.records)} measured steps, first in {steps[0]}" if steps else ""


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


# What the runs show ---------------------------------------------------------------------------------------------------

NAMED = 0.1
"""Per cent of lost updates from which the conclusion says when they were lost."""
ARRIVED = 0.01
"""Distance of EDQ from 1, where all arrives, from which a verdict says that updates are lost."""
SETTLED = 20
"""A final loss is the mean of the last one of so many measured steps: single batches are noisy."""


def title(logs: Sequence[Log]) -> str:
    """Model, optimizer, date and runs, of what the logs say: `GPT, AdamW, 22 November 2026: bf16, plus`."""
    parts = [", ".join(_all(logs, key)) for key in ("model", "optimizer")]
    days = [_day(text) for text in _all(logs, "date")]
    parts.append(" to ".join(dict.fromkeys(days[:1] + days[-1:])))
    of = ", ".join(part for part in parts if part)
    names = ", ".join(log.name for log in logs)
    return f"{of}: {names}" if of else names


def _all(logs: Sequence[Log], key: str) -> list[str]:
    """What the logs say of something, by date."""
    by_date = sorted(logs, key=lambda log: str(log.about.get("date", "")))
    return list(dict.fromkeys(str(log.about[key]) for log in by_date if log.about.get(key)))


def _day(text: str) -> str:
    try:
        day = date.fromisoformat(text[:10])
    except ValueError:
        return text
    return f"{day.day} {day:%B %Y}"


def conclusion(logs: Sequence[Log]) -> str:
    """What the runs show: how their losses end beside that of fp32, and how much of the updates arrives."""
    sound = [log for log in logs if not log.broken]
    sentences = [_losses(sound), _arrival(sound), _left_out(logs), *map(_operands, logs)]
    return " ".join(sentence for sentence in sentences if sentence) or "No run logged a loss, nor what arrives."


def final_loss(log: Log) -> float | None:
    """The mean loss of the last measured steps."""
    _, losses = log.series(LOSS)
    return fmean(losses[-max(1, len(losses) // SETTLED) :]) if losses else None


def _losses(logs: Sequence[Log]) -> str:
    finals = {log.name: loss for log in logs if (loss := final_loss(log)) is not None}
    shown = [log for log in logs if log.name in finals]
    if len(shown) < 2:
        return "".join(f"{_named(log)} has a loss of {finals[log.name]:.4f} {_when(log)}." for log in shown)
    # Such runs differ by more than their strategies.
    if len({log.series(LOSS)[0][-1] for log in shown}) > 1 or len({log.about.get("seed") for log in shown}) > 1:
        return "The runs end at different steps or have different seeds, so their losses are not compared here."
    control = next((log for log in shown if log.about.get("strategy") == "fp32"), None)
    if control is None:
        ranked = sorted(shown, key=lambda log: finals[log.name])
        said = ", ".join(f"{_named(log)} {finals[log.name]:.4f}" for log in ranked)
        return f"Losses {_when(ranked[0])}, the lowest first: {said}; there is no run of fp32 to judge them by."
    apart = {log.name: finals[log.name] - finals[control.name] for log in shown if log is not control}
    nearest, *others = sorted((log for log in shown if log is not control), key=lambda log: abs(apart[log.name]))
    said = f"{_named(nearest)} ends nearest to {_named(control)}, {_beside(apart[nearest.name])} its loss of "
    said += f"{finals[control.name]:.4f} {_when(control)}"
    rest = ", ".join(f"{_named(log)} {_beside(apart[log.name])}" for log in others)
    seed = "no seed was logged" if control.about.get("seed") is None else "these are runs of one seed"
    return f"{said}{'; ' if rest else ''}{rest}. {seed.capitalize()}: small differences may be chance."


def _when(log: Log) -> str:
    steps, _ = log.series(LOSS)
    count = max(1, len(steps) // SETTLED)
    return f"at step {steps[-1]}" if count == 1 else f"over the last {count} measured steps"


def _named(log: Log) -> str:
    size = log.about.get("bytes_per_parameter")
    return f"{log.name} ({size:g} bytes per parameter)" if isinstance(size, (int, float)) else log.name


def _beside(apart: float) -> str:
    return "at" if abs(apart) < 5e-5 else f"{abs(apart):.4f} {'above' if apart > 0 else 'below'}"


def _arrival(logs: Sequence[Log]) -> str:
    """The runs that lose most and least, of the updates that should change a weight."""
    means = {log.name: mean for log in logs if (mean := _mean(log, charts.lost("pair"))) is not None}
    if not means:
        return ""
    most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
    if most == least:  # one run, or several that lose as much
        ratios = {log.name: ratio for log in logs if (ratio := _mean(log, charts.edq("pair"))) is not None}
        each = ", ".join(
            f"{ratio:.4f}" if len(means) == 1 else f"{ratio:.4f} of {name}" for name, ratio in ratios.items()
        )
        edq_said = f" (EDQ {each}; 1 is all of it)" if each else ""
        whose = "its" if len(means) == 1 else "each run's"
        return f"{shown_share(means[most])} of {whose} updates changed nothing{edq_said}.{_late(logs)}"
    compensated = [log.name for log in logs if log.name in means and not charts.is_baseline(log)] or [least]
    others = sorted((name for name in compensated if name != most), key=means.__getitem__)
    said = [f"under {name}, {shown_share(means[name])}" for name in others]
    first = f"Under {most}, {shown_share(means[most])} of the updates changed nothing"
    return f"{'; '.join([first, *said])}.{_late(logs)}"


def _left_out(logs: Sequence[Log]) -> str:
    said = "; ".join(f"{log.name} is NaN or Inf {_nonfinite(log)}" for log in logs if log.nonfinite)
    return f"{said}{f'; runs that end so are not compared: {ADVICE}' * any(log.broken for log in logs)}." * bool(said)


def verdicts(logs: Sequence[Log]) -> list[str]:
    """A line for each run in the order given: what arrived of its updates, and whether something is to be mended."""
    figures = [_figures(log) for log in logs]
    widths = [max(map(len, column)) for column in zip(*figures, strict=True)]
    rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in figures)
    return [f"{row}: {_verdict(log)}" for row, log in zip(rows, logs, strict=True)]


def _figures(log: Log) -> list[str]:
    ratio, share = _mean(log, charts.edq("pair")), _mean(log, charts.lost("pair"))
    measured = ["" if ratio is None else f"EDQ {ratio:.4f}", "" if share is None else f"lost {share:.2f} %"]
    measured.append(f"NaN or Inf {_nonfinite(log)}" * bool(log.nonfinite))
    return [log.name, str(log.about.get("strategy", "")), *measured]


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


LATE = "lost most of them in the last fifth of the run, where the learning rate, and with it each update, is almost 0"


def _late(logs: Sequence[Log]) -> str:
    names = [log.name for log in logs if _is_lost_late(log)]
    return f" {' and '.join(names)} {LATE}." if names else ""


def _is_lost_late(log: Log) -> bool:
    """Returns True if a share worth naming was lost, most of it at the end, when updates had become small."""
    steps, values = log.series(charts.lost("pair"))
    _, norms = log.series(lambda record: record["total"]["raw_norm"])
    count = len(steps) // 5
    if not count or len(norms) != len(values) or fmean(values) < NAMED:
        return False
    return sum(values[-count:]) > sum(values[:-count]) and fmean(norms[-count:]) < max(norms) / 10


def _operands(log: Log) -> str:
    """What the last measurement of fp8 operands asks for."""
    measured: dict[str, dict[str, float | None]] = next((r["fp8"] for r in reversed(log.records) if r.get("fp8")), {})
    said = worst({name: {k: x or 0.0 for k, x in numbers.items()} for name, numbers in measured.items()})
    return "" if said is None else f"In {log.name}, {said}."


def shown_share(per_cent: float) -> str:
    """A share in three digits at most, and no finer than hundredths of a per cent."""
    if 0 < per_cent < 0.01:
        return "less than 0.01 %"
    return f"{per_cent:.3g} %" if per_cent >= 1 else f"{round(per_cent, 2):g} %"


def _mean(log: Log, value: Callable[[Line], object]) -> float | None:
    _, values = log.series(value)
    return fmean(values) if values else None
