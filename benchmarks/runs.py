"""The stored runs that tables are made of: step times in benchmarks/results, errors in docs/accuracy/records.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from accuracy.conditions import FINE_TUNING
from accuracy.table import gradient
from report import Row, Spread

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RECORDS = ROOT / "docs" / "accuracy" / "records.json"


@dataclass(frozen=True)
class Block:
    """The rows of one workload with one number of threads."""

    workload: str
    parameters: int
    tensors: int
    threads: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        what = "one tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        return f"{what}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def row(self, name: str) -> Row | None:
        return next((r for r in self.rows if r.name == name), None)


def stored(name: str) -> Any:
    """The numbers of a stored run."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def blocks(content: Any) -> list[Block]:
    return [Block(**{**b, "rows": tuple(map(_row, b["rows"]))}) for b in content["results"]]


def _row(fields: dict[str, Any]) -> Row:
    read: dict[str, Any] = {k: Spread(**v) if isinstance(v, dict) else v for k, v in fields.items()}
    return Row(**read)


def times(found: Sequence[Block], name: str) -> str:
    """The step time of a contender over torch's fused fp32 AdamW, from the smallest to the largest block; "" if none.

    `.54 to .92` of one tensor and of many, with one thread and with two.
    """
    ratios = [r.to_fused.median for b in found if (r := b.row(name)) and r.to_fused]
    if not ratios:
        return ""
    low, high = (f"{x:.2f}" if x < 10 else f"{x:.0f}" for x in (min(ratios), max(ratios)))
    return low if low == high else f"{low} to {high}"


def accuracy(condition: str = "recipe") -> dict[str, str]:
    """By contender: the mean error over seeds under a condition, as docs/accuracy.md writes it."""
    return {name: digits(found[condition]) for name, found in errors().items() if condition in found}


def fine_tuning() -> dict[str, str]:
    """By contender: the largest mean error under a condition of fine-tuning."""
    return {name: digits(max(found[c] for c in FINE_TUNING)) for name, found in errors().items()}


def errors() -> dict[str, dict[str, float]]:
    """By contender and condition: the mean error over seeds."""
    found: dict[str, dict[str, float]] = {}
    for r in json.loads(RECORDS.read_text()):
        if "errors" in r:
            found.setdefault(r["contender"], {})[r["condition"]] = fmean(r["errors"])
    return found


def digits(x: float) -> str:
    return f"{x:.1e}".replace("e-0", "e-").replace("e+00", "").replace("e+0", "e")


def bytes_kept() -> dict[str, int]:
    """By contender: bytes per parameter of weights, states and gradient, without the scales of blocks."""
    records = [r for r in json.loads(RECORDS.read_text()) if r["condition"] == "recipe"]
    return {r["contender"]: round(r["bytes"]) + gradient(r["contender"]) for r in records}


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])
