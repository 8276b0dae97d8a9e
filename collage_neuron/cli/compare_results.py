"""What `compare` says of its runs: a table and logs, whether they can be compared, and which strategy to take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from collage_neuron.monitoring.writers import plain


@dataclass
class Run:
    """One training run: the losses that a process printed."""

    strategy: str
    seed: int
    bytes_per_parameter: float
    losses: list[float]
    seconds: float = 0.0
    """Of the whole process."""

    @property
    def final(self) -> float:
        """The mean loss of the last twentieth of the steps: single batches are noisy."""
        return fmean(self.losses[-max(1, len(self.losses) // 20) :])


def table(runs: Sequence[Run]) -> str:
    """The comparison as aligned text, one row per strategy, with means over its seeds."""
    head = ("strategy", "bytes/parameter", "loss", "above fp32", "whole run")
    rows = [_row([run for run in runs if run.strategy == strategy], runs) for strategy in strategies_of(runs)]
    filled = [(name, *cells) for name, *cells in zip(head, *rows, strict=True) if any(cells)]
    widths = [max(map(len, column)) for column in filled]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in zip(*filled, strict=True))


def strategies_of(runs: Iterable[Run]) -> list[str]:
    """The strategies of the runs, in order."""
    return list(dict.fromkeys(run.strategy for run in runs))


def _row(own: Sequence[Run], runs: Sequence[Run]) -> tuple[str, ...]:
    return (
        own[0].strategy,
        f"{own[0].bytes_per_parameter:.1f}",
        f"{fmean(run.final for run in own):.4f}",
        _differences(above(own[0].strategy, runs)),
        f"{fmean(run.seconds for run in own):.1f} s",
    )


def above(strategy: str, runs: Sequence[Run]) -> list[float]:
    """For each seed, the final loss minus that of fp32 with the same seed."""
    fp32 = {run.seed: run.final for run in runs if run.strategy == "fp32"}
    return [run.final - fp32[run.seed] for run in runs if run.strategy == strategy and run.seed in fp32]


def _differences(apart: Sequence[float]) -> str:
    if not apart:
        return ""
    spread = f" ± {spread_of(apart):.4f}" if len(apart) > 1 else ""
    mean = f"{fmean(apart):+.4f}"
    return f"{'0.0000' if mean in ('+0.0000', '-0.0000') else mean}{spread}"


def spread_of(values: Sequence[float]) -> float:
    """The standard deviation; NaN if a value is not finite, for which `statistics.stdev` raises."""
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def write_logs(runs: Sequence[Run], folder: Path) -> None:
    """A log for each strategy, for `report`: the mean loss of its seeds."""
    for strategy in strategies_of(runs):
        own = [run for run in runs if run.strategy == strategy]
        about = {"strategy": strategy, "bytes_per_parameter": own[0].bytes_per_parameter}
        losses = map(fmean, zip(*(run.losses for run in own), strict=False))
        lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        text = "".join(f"{json.dumps(plain(line))}\n" for line in (about, *lines))
        (folder / f"{strategy}.jsonl").write_text(text, encoding="utf-8")


def remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences below the table: whether the runs are comparable, what the columns mean, then the recommendation."""
    said = [*_nonfinite(runs), *_unlike(runs), *_meaning(runs), recommendation(runs)]
    return [f"{text[:1].upper()}{text[1:]}." for text in said]


def _nonfinite(runs: Sequence[Run]) -> Iterator[str]:
    found = []
    for run in runs:
        if steps := [i for i, loss in enumerate(run.losses, 1) if not math.isfinite(loss)]:
            where = f"{len(steps)} of {len(run.losses)} printed losses, first in {steps[0]}"
            found.append(f"{run.strategy} with seed {run.seed} in {where}")
    if found:
        yield f"NaN or Inf: {'; '.join(found)}. Try a lower learning rate"


def _meaning(runs: Sequence[Run]) -> Iterator[str]:
    """What the columns of the table are."""
    takes_last = all(len(run.losses) // 20 < 2 for run in runs)
    yield f"loss is the {'last' if takes_last else 'mean of the last twentieth'} that a run printed"
    yield "whole run is wall time with imports and generating code"
    yield "bytes per parameter are what each first step said, or Adam's where a script is silent (verbose=False)"


def _unlike(runs: Sequence[Run]) -> Iterator[str]:
    for seed in dict.fromkeys(run.seed for run in runs):
        first = [run.losses[0] for run in runs if run.seed == seed]
        # A process may print its first loss after some steps, when strategies have begun to differ.
        if any(not math.isclose(x, first[0], rel_tol=0.05) for x in first):
            yield (
                f"the runs with seed {seed} do not start alike (first losses {', '.join(f'{x:.4f}' for x in first)}): "
                "the script draws from something that is not seeded; the rows cannot be compared"
            )


NEGLIGIBLE = 1e-3
"""A loss that is above fp32's by less than so much of what fp32 gained in the run is as good."""


def recommendation(runs: Sequence[Run]) -> str:
    """The cheapest strategy whose loss, from the same seed, is not above fp32's by more than chance or a trifle."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    fp32 = [run for run in runs if run.strategy == "fp32"]
    if not fp32:
        return "no recommendation: fp32 is not among the strategies, and without it there is nothing to judge by"
    if len(seeds) == 1:
        return (
            "one seed cannot tell a difference from chance: `--seeds 0 1 2` gives a recommendation (a script has its "
            "own option for a seed, which follows after --, as: -- --seed {seed})"
        )
    # Nor is what it gained known if it began so.
    if not all(math.isfinite(run.losses[0] - run.final) for run in fp32):
        return "no recommendation: a loss of fp32 is not finite"
    sizes = {run.strategy: run.bytes_per_parameter for run in runs}
    trifle = NEGLIGIBLE * abs(fmean(run.losses[0] - run.final for run in fp32))
    near = [name for name in sizes if _is_near(above(name, runs), trifle)]
    # fp32 is near to itself, so there is one.
    least = min(near, key=sizes.__getitem__)
    smaller = [name for name in sizes if sizes[name] < sizes[least]]
    verb = "needs less and loses more" if len(smaller) == 1 else "need less and lose more"
    said = f"; {', '.join(f'{name} ({_differences(above(name, runs))})' for name in smaller)} {verb}" if smaller else ""
    return (
        f"recommendation: {least}, {sizes[least]:.3g} bytes per parameter; its loss minus that of fp32 from the same "
        f"seed is {_differences(above(least, runs))} (mean and standard deviation of {len(seeds)} seeds){said}"
    )


def _is_near(apart: Sequence[float], trifle: float) -> bool:
    """Returns True if the mean difference is within twice its standard error, or a trifle; never for NaN or Inf."""
    chance = 2 * spread_of(apart) / math.sqrt(len(apart))
    return all(map(math.isfinite, apart)) and fmean(apart) <= max(trifle, chance)
