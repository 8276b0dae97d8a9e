"""What the page and the claims read off the records: means over seeds, differences from fp32, usable learning rates."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from study.jobs import Record, Results

TOLERANCE = 0.05
"""A learning rate is usable if every seed ends within this part of the best mean loss that fp32 has at any."""


def result(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = record["result"]
    return found


def final(record: Record) -> list[float]:
    """The last validation loss of each seed of a language run."""
    losses: list[float] = result(record)["validation"][-1]
    return losses


def above(record: Record, reference: Record) -> list[float]:
    """By how much each seed ends above the same seed of the reference."""
    return [a - b for a, b in zip(final(record), final(reference), strict=True)]


def spread(values: Sequence[float]) -> float:
    """The standard deviation between seeds."""
    return stdev(values) if len(values) > 1 else 0.0


def over_run(record: Record, key: str) -> float | None:
    """The mean over the run and the seeds of what was measured along the way; None if it was not."""
    seeds = [x for row in result(record).get(key, []) for x in row if x is not None and not math.isnan(x)]
    return fmean(seeds) if seeds else None


def decays(results: Results) -> list[str]:
    """The values of beta2 of the language runs, as their names write them; LookupError if there are no runs."""
    found = list(dict.fromkeys(name.rpartition(" ")[2] for name in results["language"]))
    if not found:
        raise LookupError("no language model was trained")
    return found


def language(results: Results, name: str, beta2: str) -> Record | None:
    """The language run of a variant or a control at a decay."""
    title = f"{name} {beta2}"
    return results["language"].get(title) or results["controls"].get(title)


def best(grid: Mapping[str, Record]) -> float:
    """The best mean loss of fp32 at any learning rate of the grid."""
    return min(map(fmean, result(grid["fp32"])["validation"]))


def usable(record: Record, limit: float) -> list[float]:
    """The learning rates at which every seed ends below the limit."""
    rows = zip(record["settings"]["lrs"], result(record)["validation"], strict=True)
    return [lr for lr, losses in rows if all(loss <= limit for loss in losses)]


def diverged(record: Record) -> int:
    """How many runs end worse than a model that knows the frequency of each byte and nothing else, or with a NaN."""
    entropy = result(record)["entropy"]
    return sum(not loss <= entropy for losses in result(record)["training"] for loss in losses)
