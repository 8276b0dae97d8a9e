"""What is read from the records of the study: losses by way, seed and condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from study.jobs import Record

from fp8.training import Run

USUAL = Run("bf16")


@dataclass(frozen=True)
class Part:
    """A table of the study: the records it is made of, and the setting that differs between its columns."""

    title: str
    column: str
    has: Callable[[Record], bool]
    value: Callable[[Record], float]


def _plain(record: Record) -> bool:
    return all(record[name] == getattr(USUAL, name) for name in ("factor", "outliers", "depth", "steps"))


PARTS = (
    Part("Two layers, 600 steps, three learning rates", "learning rate", _plain, lambda r: float(r["lr"])),
    Part(
        "The loss times 1e-4",
        "loss times",
        lambda r: r["factor"] != 1 or (_plain(r) and r["lr"] == USUAL.lr),
        lambda r: float(r["factor"]),
    ),
    Part(
        "Outlier channels: two of 64 channels of each layer's inputs are larger",
        "times",
        lambda r: r["outliers"] != 1 or (_plain(r) and r["lr"] == USUAL.lr and r["way"] not in ("unscaled", "frozen")),
        lambda r: float(r["outliers"]),
    ),
    Part("Depth, 200 steps, learning rate 0.001", "layers", lambda r: r["steps"] == 200, lambda r: float(r["depth"])),
)


def chosen(part: Part, records: Sequence[Record], value: float) -> list[Record]:
    """The records of a column."""
    return [r for r in records if part.has(r) and part.value(r) == value]


def home(record: Record) -> Part | None:
    """The first table that has a record, if one does: some stand in others again, to be compared with."""
    return next((part for part in PARTS if part.has(record)), None)


def losses(records: Sequence[Record], way: str) -> dict[int, float]:
    """The validation loss of each seed."""
    return {r["seed"]: r["loss"] for r in records if r["way"] == way}


def above(records: Sequence[Record], way: str) -> dict[int, float]:
    """By how much the loss is above bf16's of the same seed, where both ran."""
    base = losses(records, "bf16")
    return {seed: x - base[seed] for seed, x in losses(records, way).items() if seed in base}


def spread(records: Sequence[Record]) -> float:
    """The range of bf16's losses over its seeds: what differences are judged by."""
    found = losses(records, "bf16").values()
    return max(found) - min(found)


def worst_operand(records: Sequence[Record], way: str) -> float | None:
    """The largest part of any operand that became zero, at the end of any of these runs; None if not known."""
    found = [r["operands"]["vanished"][1] for r in records if r["way"] == way and "operands" in r]
    return max(found, default=None)


SEVERAL = 3
"""The seeds of bf16 from which on their range says something."""


def judged(records: Sequence[Record], ways: Sequence[str]) -> Iterator[tuple[str, float, float]]:
    """Of each cell with a range: its place, and the distances of the mean and of the worst seed, in ranges."""
    for part in PARTS:
        for value in sorted({part.value(r) for r in records if part.has(r)}):
            found = [r for r in chosen(part, records, value) if home(r) is part]
            if len(losses(found, "bf16")) < SEVERAL:
                continue
            for way in ways:
                apart = list(above(found, way).values())
                if apart:
                    place = f"{way}, {part.column} {value:g}"
                    yield place, abs(fmean(apart)) / spread(found), max(map(abs, apart)) / spread(found)


def missing(records: Sequence[Record], planned: Iterable[Record]) -> dict[str, tuple[int, int]]:
    """Of each column that lacks runs: how many are missing, and of how many."""
    found = [_settings(r) for r in records]
    counts: dict[str, tuple[int, int]] = {}
    for run in planned:
        part = home(run)
        place = f"{part.column} {part.value(run):g}" if part else "other settings"
        lacking, of = counts.get(place, (0, 0))
        counts[place] = lacking + (_settings(run) not in found), of + 1
    return {place: (lacking, of) for place, (lacking, of) in counts.items() if lacking}


def _settings(record: Record) -> list[object]:
    return [record[field.name] for field in fields(Run)]


def drifts(records: Sequence[Record], after: int = 50) -> Iterator[tuple[int, float]]:
    """Of each measurement of `offsets` after some calls: the calls since the one before, and the largest drift."""
    for record in records:
        if record["way"] == "offsets":
            last = record["steps"] + 1  # the run's first call is a rehearsal; behind the last one it is inspected
            yield from ((since, drift) for call, since, drift in record["drifts"] if after < call <= last)
