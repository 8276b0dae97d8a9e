"""What `compare` says of its runs: a table and logs, whether they can be compared, and which strategy to take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev

from collage_neuron.cli.charts import MEANING
from collage_neuron.monitoring.metrics import Record
from collage_neuron.monitoring.writers import plain

UNCOMPILED = "uncompiled"
"""The name of the run with the model and optimizer as the script made them."""


@dataclass
class Run:
    """One training run: a loss per step, seconds per step for each stretch, and the measured updates."""

    strategy: str
    seed: int
    bytes_per_parameter: float = math.nan
    losses: list[float] = field(default_factory=list)
    """Of a process: the losses that it printed."""
    seconds: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    whole: float = math.nan
    """Seconds of the whole process, if the run was one."""

    @property
    def final(self) -> float:
        """The mean loss of the last twentieth of the steps: single batches are noisy."""
        return fmean(self.losses[-max(1, len(self.losses) // 20) :])


def table(runs: Sequence[Run]) -> str:
    """The comparison as aligned text: the columns with numbers, one row per strategy, with means over its seeds."""
    head = ("strategy", "bytes/parameter", "loss", "above fp32", "EDQ", "lost updates", "step", "whole run")
    rows = [_row([run for run in runs if run.strategy == strategy], runs) for strategy in strategies_of(runs)]
    filled = [(name, *cells) for name, *cells in zip(head, *rows, strict=True) if any(cells)]
    widths = [max(map(len, column)) for column in filled]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in zip(*filled, strict=True))


def strategies_of(runs: Iterable[Run]) -> list[str]:
    """The strategies of the runs, in order."""
    return list(dict.fromkeys(run.strategy for run in runs))


def _row(own: Sequence[Run], runs: Sequence[Run]) -> tuple[str, ...]:
    steps = [second for run in own for second in run.seconds]
    measured = [record.total.pair for run in own for record in run.records]
    return (
        own[0].strategy,
        _cell([own[0].bytes_per_parameter], "{:.1f}"),
        f"{fmean(run.final for run in own):.4f}",
        _differences(above(own[0].strategy, runs)),
        _cell([effect.ratio for effect in measured], "{:.4f}"),
        _cell([effect.lost for effect in measured], "{:.2f} %"),
        f"{1e3 * median(steps):.1f} ms" if steps else "",
        _cell([run.whole for run in own], "{:.1f} s"),
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


def _cell(values: Sequence[float], form: str) -> str:
    """The mean of the values that are numbers; empty if none is."""
    known = [x for x in values if not math.isnan(x)]
    return form.format(fmean(known)) if known else ""


def write_logs(runs: Sequence[Run], folder: Path) -> None:
    """A log for each strategy, for `report`: the mean loss of the seeds, and the measurements of the first."""
    for strategy in strategies_of(runs):
        own = [run for run in runs if run.strategy == strategy]
        about = {"strategy": strategy, "bytes_per_parameter": own[0].bytes_per_parameter}
        measured = {record.step: record.as_dict() for record in own[0].records}
        losses = map(fmean, zip(*(run.losses for run in own), strict=False))
        lines = [{"step": step, "loss": loss, **measured.get(step, {})} for step, loss in enumerate(losses, 1)]
        text = "".join(f"{json.dumps(plain(line))}\n" for line in (about, *lines))
        (folder / f"{strategy}.jsonl").write_text(text, encoding="utf-8")


def remarks(runs: Sequence[Run]) -> list[str]:
    """Sentences below the table: whether the runs are comparable, what the columns mean, then the recommendation."""
    said = [*_nonfinite(runs), *_unlike(runs), *_meaning(runs), recommendation(runs)]
    return [f"{text[:1].upper()}{text[1:].removesuffix('.')}." for text in said]


def _nonfinite(runs: Sequence[Run]) -> Iterator[str]:
    what, found = "printed losses" if is_printed(runs) else "steps", []
    for run in runs:
        updates = {record.step for record in run.records if not record.total.finite}
        if steps := updates | {i for i, loss in enumerate(run.losses, 1) if not math.isfinite(loss)}:
            where = f"{len(steps)} of {len(run.losses)} {what}, first in {min(steps)}"
            found.append(f"{run.strategy} with seed {run.seed} in {where}")
    if found:
        yield f"NaN or Inf: {'; '.join(found)}; EDQ and lost updates leave these out. Try a lower learning rate"


def _meaning(runs: Sequence[Run]) -> Iterator[str]:
    """What the columns of the table are."""
    if is_printed(runs):
        takes_last = all(len(run.losses) // 20 < 2 for run in runs)
        yield f"loss is the {'last' if takes_last else 'mean of the last twentieth'} that a run printed"
        steps = "speeds are compared by `step`, which a script with make() shows"
        yield f"whole run is wall time with imports and generating code; {steps}"
        yield "bytes per parameter are what each first step said, or Adam's where a script is silent (verbose=False)"
    if any(run.records for run in runs):
        yield MEANING
    if any(run.seconds for run in runs):
        yield "step is the forward pass, the backward pass and the update of the model, on this machine"


def is_printed(runs: Sequence[Run]) -> bool:
    """Returns True if the losses are those that processes printed."""
    return any(not math.isnan(run.whole) for run in runs)


def _unlike(runs: Sequence[Run]) -> Iterator[str]:
    printed = is_printed(runs)
    for seed in dict.fromkeys(run.seed for run in runs):
        first = [run.losses[0] for run in runs if run.seed == seed and run.strategy != UNCOMPILED]
        # A process may print its first loss after some steps, when strategies have begun to differ.
        if any(not math.isclose(x, first[0], rel_tol=0.05 if printed else 1e-3) for x in first):
            source = "the script draws" if printed else "make() draws"
            yield (
                f"the runs with seed {seed} do not start alike (first losses {', '.join(f'{x:.4f}' for x in first)}): "
                f"{source} from something that is not seeded, or reads its data on; the rows cannot be compared"
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
        option = " (the script's own option for a seed after --, as: -- --seed {seed})" * is_printed(runs)
        return f"one seed cannot tell a difference from chance: `--seeds 0 1 2` gives a recommendation{option}"
    # Nor is what it gained known if it began so.
    if not all(math.isfinite(run.losses[0] - run.final) for run in fp32):
        return "no recommendation: a loss of fp32 is not finite"
    # The model as the script made it has no strategy that could be recommended.
    sizes = {run.strategy: run.bytes_per_parameter for run in runs if run.strategy != UNCOMPILED}
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
