"""Writes docs/accuracy.md, its figure, and the records that both were made from."""

from __future__ import annotations

import json
import platform
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from study.jobs import Record, versions, write_records, write_whole
from study.page import table as markdown

from accuracy import figure, front
from accuracy.conditions import COLUMNS, FINE_TUNING, PRE_TRAINING, ROWS
from accuracy.goals import Goal
from accuracy.language import SEEDS, STEPS
from accuracy.table import Row, conditions, losses, number, rows, text
from accuracy.text import TEXT
from collage_neuron.numerics.strategies import BY_ACCURACY


def write(
    records: Sequence[Record], missing: Mapping[str, str], folder: Path, older: Sequence[Record], missing_jobs: int = 0
) -> None:
    """`accuracy.md` in the folder, and the figures and the records in `accuracy/` beside it."""
    found = rows(records)
    write_records(folder / "accuracy" / "records.json", records)
    draw(folder)
    write_whole(folder / "accuracy.md", page(records, found, missing, older, missing_jobs))


def draw(folder: Path) -> None:
    """The figures of the records that are stored beside the page."""
    found = rows(json.loads((folder / "accuracy" / "records.json").read_text()))
    write_whole(folder / "accuracy" / "error_over_bytes.svg", figure.draw(found))
    write_whole(folder / "accuracy" / "error_at_the_recipe.svg", figure.draw_recipe(found))


def page(
    records: Sequence[Record],
    found: Sequence[Row],
    missing: Mapping[str, str],
    older: Sequence[Record],
    missing_jobs: int = 0,
) -> str:
    """The whole page."""
    minutes = round(sum(r["seconds"] for r in records) / 2 / 60)
    note = earlier(older)
    if missing_jobs:
        note += f"\nThis is not the whole table: {missing_jobs} jobs have not run, and have a `-` or no row.\n"
    return TEXT.format(
        jobs=len(records),
        minutes=minutes,
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        machine=platform.machine(),
        note=note,
        seeds=len(records[0]["seeds"]),
        shape=f"{ROWS} x {COLUMNS}",
        table=errors(found, PRE_TRAINING),
        conditions=markdown(("condition", "what it is"), ((f"`{c.name}`", c.what) for c in PRE_TRAINING.values())),
        fine_tuning=errors(found, FINE_TUNING),
        order=textwrap.fill(", ".join(f"`{n}`" for n in front.by_accuracy(found) if n in BY_ACCURACY) + ".", 118),
        goals=goals(found),
        peers=peers(found),
        language=language(records, found),
        language_steps=STEPS,
        language_seeds=len(SEEDS),
        missing="".join(f"\nNot compared, because it does not run here: {k} ({v}).\n" for k, v in missing.items()),
    )


def earlier(records: Sequence[Record]) -> str:
    """A note on the jobs that ran before the sources changed, with their days and versions; empty if there are none.

    Says "by" a day: records without one of their own got that of the commit which stored them.
    """
    if not records:
        return ""
    days = Counter((record["date"], record["version"]) for record in records)
    when = ", ".join(f"{count} by {date} (version {version})" for (date, version), count in sorted(days.items()))
    text = (
        f"{len(records)} of the jobs ran before the sources of the package or of this benchmark last changed "
        f"(`--keep`): {when}. `code` in each record is a digest of the sources that it ran with."
    )
    return f"\n{textwrap.fill(text, 118)}\n"


def errors(found: Sequence[Row], of: Iterable[str]) -> str:
    """Bytes and errors of every contender under some conditions; strategies of this package in code style."""
    columns = conditions(found, of)
    body = (
        [f"`{row.name}`" if row.own else row.name, size(row), *(text(found, name, row) for name in columns)]
        for row in found
    )
    return markdown(("", "bytes", *columns), body)


def goals(found: Sequence[Row]) -> str:
    """One row per goal: bound, worst error over seeds and conditions, and the answer."""
    body = (
        [
            str(goal.bytes),
            f"`{goal.strategy}`",
            "fine-tuning" if goal.conditions == tuple(FINE_TUNING) else ", ".join(goal.conditions),
            f"{goal.bound:g} times {goal.unit}" if goal.unit else number(goal.bound),
            worst(goal, measured),
            verdict(goal, measured),
        ]
        for goal, measured in front.goals(found)
    )
    return markdown(("bytes", "strategy", "conditions", "at most", "worst seed (condition)", ""), body)


def size(row: Row) -> str:
    """Bytes per parameter: two digits after the point, of which zeros are left out."""
    return f"{row.bytes:.2f}".rstrip("0").rstrip(".")


def worst(goal: Goal, measured: Mapping[str, float]) -> str:
    """The largest number that was measured, and where."""
    if not measured:
        return "-"
    where = max(measured, key=lambda name: measured[name])
    return f"{f'{measured[where]:.2f}' if goal.unit else number(measured[where])} ({where})"


def verdict(goal: Goal, measured: Mapping[str, float]) -> str:
    """Whether a goal is met; it is not known while one of its conditions has not run."""
    if not all(x <= goal.bound for x in measured.values()):
        return "**missed**"
    return "met" if len(measured) == len(goal.conditions) else "not measured in every condition"


def language(records: Sequence[Record], found: Sequence[Row]) -> str:
    """The validation loss of each contender, those with more bytes first."""
    by_name = {loss.name: loss for loss in losses(records)}
    body = (
        [
            f"`{row.name}`" if row.own else row.name,
            size(row),
            f"{fmean(loss.losses):.4f} ± {stdev(loss.losses):.4f}",
            f"{fmean(loss.above):+.4f} ± {stdev(loss.above):.4f}",
            "yes" if loss.seen else "no",
        ]
        for row in found
        if (loss := by_name.get(row.name)) is not None
    )
    if not by_name:
        return "Not measured yet."
    return markdown(("", "bytes", "validation loss", "above torch fp32", "worse by more than chance"), body)


def peers(found: Sequence[Row]) -> str:
    """Each peer beside the most accurate strategy of at most as many bytes."""
    return markdown(("", "bytes", "recipe", "strategy", "bytes", "recipe", "worse under"), _peers(found))


def _peers(found: Sequence[Row]) -> Iterator[list[str]]:
    for row in found:
        ours = None if row.own else front.best(found, row, "recipe")
        if row.own or "recipe" not in row.errors:
            continue
        mine = ["none", "-", "-"] if ours is None else [f"`{ours.name}`", size(ours), number(ours.mean("recipe"))]
        lost = front.losing(found, row) if ours is not None else []
        unknown = [name for name in row.errors if front.best(found, row, name) is None]
        last = f"{', '.join(lost) or '-'}" + (f" (not measured: {', '.join(unknown)})" if unknown and ours else "")
        yield [row.name, size(row), number(row.mean("recipe")), *mine, last]
