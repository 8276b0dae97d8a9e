"""Controls of the language runs: fp32 at other learning rates, those that a wrong second moment amounts to included.

A second moment that is too small makes every step longer, and a learning rate below the best one then looks like a
better algorithm. So each variant whose second moment is wrong is compared with fp32 at the learning rate it took.
"""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from study import language
from study.jobs import Job, Record, needed
from study.variants import RELEASED

VARIANTS = ("bf16", "light", RELEASED)
FACTOR = 1.5


def jobs(quick: bool, results: Mapping[str, Mapping[str, Record]]) -> Iterator[Job]:
    names = language.QUICK_NAMES if quick else language.NAMES
    for beta2 in language.BETA2[-1:] if quick else language.BETA2:
        yield language.job("controls", f"fp32 x {FACTOR}", "fp32", beta2, FACTOR, quick)
        for name in VARIANTS:
            if name in names:
                factor = step_size(needed(results, "language", f"{name} {beta2:g}")["result"])
                yield language.job("controls", f"fp32 like {name}", "fp32", beta2, factor, quick)


def step_size(result: Mapping[str, Any]) -> float:
    """By how much the kept second moment lengthened the steps, on average over the run and the seeds."""
    return round(fmean(fmean(seeds) for seeds in result["step size"]), 3)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """A language run."""
    return language.run(settings)
