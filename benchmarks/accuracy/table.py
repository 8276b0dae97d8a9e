"""The table of errors, strategy by condition, and what is read from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from study.jobs import Record

from accuracy.conditions import CONDITIONS


@dataclass(frozen=True)
class Row:
    """One contender: bytes per parameter (weight, gradient, states), and the errors of all seeds by condition."""

    name: str
    source: str
    bytes: float
    errors: dict[str, list[float]]

    @property
    def own(self) -> bool:
        return self.source == "collage_neuron"

    def mean(self, condition: str) -> float:
        return fmean(self.errors[condition])

    @property
    def worst(self) -> dict[str, float]:
        return {condition: max(errors) for condition, errors in self.errors.items()}


def rows(records: Iterable[Record]) -> list[Row]:
    """One row per contender, those with more bytes first, then the less accurate one first."""
    by_name: dict[str, Row] = {}
    for r in (record for record in records if "errors" in record):
        row = by_name.setdefault(
            r["contender"], Row(r["contender"], r["source"], r["bytes"] + gradient(r["contender"]), {})
        )
        row.errors[r["condition"]] = r["errors"]
    return sorted(by_name.values(), key=lambda row: (-row.bytes, -next(iter(row.worst.values()))))


def gradient(contender: str) -> int:
    """Bytes per parameter of a contender's gradient, which its record does not count: bf16, but for torch's fp32."""
    return 4 if contender == "torch fp32" else 2


def conditions(found: Sequence[Row], of: Iterable[str] = CONDITIONS) -> list[str]:
    """Those of the conditions that ran, in their order."""
    return [name for name in of if any(name in row.errors for row in found)]


def number(x: float) -> str:
    """Two digits; 1e-05 is written 1e-5."""
    return f"{x:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e") if x == x else "-"


def text(found: Sequence[Row], condition: str, row: Row) -> str:
    return number(row.mean(condition)) if condition in row.errors else "-"


def plain(found: Sequence[Row]) -> str:
    """The table for a terminal."""
    columns = conditions(found)
    head = f"{'':>22} {'bytes':>5} " + " ".join(f"{name:>8}" for name in columns)
    lines = (
        f"{row.name:>22} {row.bytes:5.2f} " + " ".join(f"{text(found, name, row):>8}" for name in columns)
        for row in found
    )
    return "\n".join((head, *lines))


@dataclass(frozen=True)
class Loss:
    """The validation losses of one contender, by seed, and how far they are above those of torch's fp32."""

    name: str
    losses: list[float]
    above: list[float]

    @property
    def seen(self) -> bool:
        """Returns True if the loss is above fp32's by more than chance: twice the standard error over seeds."""
        chance: float = 2 * stdev(self.above) / len(self.above) ** 0.5
        return fmean(self.above) > chance


def losses(records: Iterable[Record]) -> list[Loss]:
    """The validation losses of the contenders that were trained on text; empty if torch's fp32 was not."""
    found = {r["contender"]: r["losses"] for r in records if "losses" in r}
    fp32 = found.get("torch fp32", [])
    return [Loss(name, own, [x - y for x, y in zip(own, fp32, strict=True)]) for name, own in found.items() if fp32]
