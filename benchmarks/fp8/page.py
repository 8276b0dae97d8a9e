"""The tables of docs/development/fp8.md, each loss beside bf16 with its seed; the figure, and the records of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from study.jobs import Record, write_records, write_whole
from study.page import table

from fp8 import figure, jobs
from fp8.jobs import SCALED
from fp8.readings import PARTS, SEVERAL, Part, above, chosen, drifts, judged, losses, missing, spread, worst_operand
from fp8.training import PACKAGE, Run
from fp8.trainium import gains

BEGIN, GAINS = "<!-- fp8 study -->", "<!-- fp8 trn2 -->"
END = "<!-- end -->"
SHOWN = 0.01
"""The part of an operand that became zero from which on a table says so."""
WAYS = ("bf16", "amax", "propagated", "offsets", "unscaled", "frozen")


def tables(records: Sequence[Record], planned: Sequence[Run]) -> str:
    """All tables, and what they are of."""
    pieces = [_about(records, planned)]
    for part in PARTS:
        if found := [r for r in records if part.has(r)]:
            pieces += [f"**{part.title}**", _table(part, found)]
    pieces += [said for said in (_distance(records), _drift(records)) if said]
    return "\n\n".join(pieces)


def _about(records: Sequence[Record], planned: Sequence[Run]) -> str:
    older = sum(r["code"] != jobs.code(r["way"] in PACKAGE) for r in records)
    minutes = sum(r["cpu_seconds"] for r in records) / 60
    text = f"{len(records)} of {len(planned)} runs, {minutes:.0f} minutes of one core."
    if lacking := missing(records, map(asdict, planned)):
        text += (
            " The others have not run yet: cells without a run are empty, and averages are over the seeds that ran. "
            f"Missing: {'; '.join(f'{n} of {of} at {place}' for place, (n, of) in lacking.items())}."
        )
    return text + (f" {older} of them ran with earlier sources (`--keep`)." if older else "")


def _table(part: Part, records: Sequence[Record]) -> str:
    values = sorted({part.value(r) for r in records})
    head = ["", "reductions in a step", *(f"{part.column} {x:g}" for x in values)]
    rows = [_row(way, part, values, records) for way in WAYS if any(r["way"] == way for r in records)]
    return table(head, rows)


def _row(way: str, part: Part, values: Sequence[float], records: Sequence[Record]) -> list[str]:
    mine = [r for r in records if r["way"] == way]
    return [way, str(mine[0]["reductions"]), *(_cell(way, chosen(part, records, x)) for x in values)]


def _cell(way: str, records: Sequence[Record]) -> str:
    """Of bf16 its mean loss and range; of others the mean distance from it, that of the worst seed, what vanished."""
    found = losses(records, way)
    if not found:
        return ""
    if way == "bf16":
        return f"{fmean(found.values()):.4f}" + (
            f", range {spread(records):.4f} of {len(found)}" if len(found) > 1 else ""
        )
    apart = list(above(records, way).values())
    if not apart:
        return ""
    text = f"{fmean(apart):+.4f} (at most {max(map(abs, apart)):.4f})"
    worst = worst_operand(records, way)
    return f"{text}; {worst:.0%} of an operand vanished" if worst is not None and worst >= SHOWN else text


def _distance(records: Sequence[Record]) -> str:
    """How the ways that scale lie to the range of bf16's seeds, where enough of these ran."""
    found = list(judged(records, SCALED[1:]))
    if not found:
        return ""
    within, beyond = sum(worst <= 1 for _, _, worst in found), [place for place, mean, _ in found if mean > 1]
    text = (
        f"Where {SEVERAL} seeds of bf16 or more ran, the mean distance of {', '.join(SCALED[1:])} is within the range "
        f"of bf16's seeds in {len(found) - len(beyond)} of {len(found)} cells, and that of the worst seed in {within}."
    )
    return text + (f" Beyond it: {'; '.join(beyond)}." if beyond else "")


def _drift(records: Sequence[Record]) -> str:
    """What the measurements of `offsets` say from the first 50 calls on."""
    found = list(drifts(records))
    if not found:
        return ""
    beyond = sum(d > 2 for _, d in found)
    early = sum(since < 49 for since, _ in found)  # calls 51, 100, 151, ... are due
    return (
        f"Of {len(found)} measurements of `offsets` after call 50, {len(found) - beyond} found every operand within "
        f"two binades of its scale; the largest drift was {max(d for _, d in found):.0f} binades. {early} came sooner "
        "than after 49 calls."
    )


def write(records: Sequence[Record], text: str, folder: Path) -> None:
    """Replaces the tables in `fp8.md` of the folder; writes the figure and the records beside it."""
    write_records(folder / "fp8" / "records.json", records)
    write_whole(folder / "fp8" / "losses.svg", figure.draw(records))
    put(folder, BEGIN, f"{text}\n\n")
    put(folder, GAINS, f"{gains()}\n")


def put(folder: Path, mark: str, text: str) -> None:
    """Replaces what stands behind a mark in the page."""
    page = folder / "fp8.md"
    before, _, rest = page.read_text().partition(mark)
    write_whole(page, f"{before}{mark}\n{text}{END}{rest.partition(END)[2]}")
