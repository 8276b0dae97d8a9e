"""What is read from the records of the study: losses by way, seed and condition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    return bool(record["factor"] == record["outliers"] == 1 and record["depth"] == USUAL.depth)


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


def drifts(records: Sequence[Record], after: int = 50) -> Iterator[tuple[int, float]]:
    """Of each measurement of `offsets` after some calls: the calls since the one before, and the largest drift."""
    for record in records:
        if record["way"] == "offsets":
            last = record["steps"] + 1  # the run's first call is a rehearsal; behind the last one it is inspected
            yield from ((since, drift) for call, since, drift in record["drifts"] if after < call <= last)
