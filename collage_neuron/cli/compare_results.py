"""What `compare` says of its runs: a table and a page, whether they can be compared, and which strategy to take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from collage_neuron.cli.charts import CHARTS, MEANING, Figure, above_fp32, line_chart
from collage_neuron.cli.html_page import Card, document
from collage_neuron.cli.html_page import table as html_table
from collage_neuron.cli.palette import assigned
from collage_neuron.monitoring.metrics import Record
from collage_neuron.monitoring.run_log import Log

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
    loss_line: str = ""
    """The line from which the last loss of a process was read."""

    @property
    def final(self) -> float:
        """The mean loss of the last twentieth of the steps: single batches are noisy."""
        return fmean(self.losses[-max(1, len(self.losses) // 20) :])

    @property
    def edq(self) -> float:
        """EDQ / ||raw update|| of the stored values, over the measured steps."""
        return _mean([r.total.pair.ratio for r in self.records])

    @property
    def lost(self) -> float:
        """The percentage of updates that changed nothing at all."""
        return _mean([r.total.pair.lost for r in self.records])


def cells(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """The comparison: heads of the columns with numbers, and one row per strategy, with means over its seeds."""
    head = ("strategy", "bytes/parameter", "loss", "above fp32", "EDQ", "lost updates", "step", "whole run")
    rows = [_row(strategy, runs) for strategy in strategies_of(runs)]
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [head[i] for i in filled], [[row[i] for i in filled] for row in rows]


def table(runs: Sequence[Run]) -> str:
    """The comparison as aligned text."""
    head, rows = cells(runs)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in (head, *rows))


def strategies_of(runs: Iterable[Run]) -> list[str]:
    """The strategies of the runs, in order."""
    return list(dict.fromkeys(run.strategy for run in runs))


def _row(strategy: str, runs: Sequence[Run]) -> tuple[str, ...]:
    own = [run for run in runs if run.strategy == strategy]
    steps = [second for run in own for second in run.seconds]
    return (
        strategy,
        _cell(own[0].bytes_per_parameter, "{:.1f}"),
        f"{fmean(run.final for run in own):.4f}",
        _differences(above(strategy, runs)),
        _cell(_mean([run.edq for run in own]), "{:.4f}"),
        _cell(_mean([run.lost for run in own]), "{:.2f} %"),
        f"{1e3 * median(steps):.1f} ms" if steps else "",
        _cell(_mean([run.whole for run in own]), "{:.1f} s"),
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


def _cell(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _mean(values: Sequence[float]) -> float:
    known = [x for x in values if not math.isnan(x)]
    return fmean(known) if known else math.nan


ALONE = "collage_neuron compare"
"""The command that trains the tiny built-in model."""


def remarks(runs: Sequence[Run], again: str = ALONE) -> list[str]:
    """Sentences below the table: whether the runs are comparable, what the columns mean, then the recommendation.

    `again` is the command of the comparison without its seeds.
    """
    said = [*_nonfinite(runs), *_unlike(runs), *_meaning(runs, again == ALONE), recommendation(runs, again)]
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


SHOWN = 60
"""The number of characters that are shown of the line from which a loss was read."""


def _meaning(runs: Sequence[Run], tiny: bool) -> Iterator[str]:
    """What the columns of the table are."""
    if is_printed(runs):
        line = next((run.loss_line for run in runs if run.loss_line), "")
        shown = f", here from `{line if len(line) <= SHOWN else line[: SHOWN - 3] + '...'}`" if line else ""
        takes_last = all(len(run.losses) // 20 < 2 for run in runs)
        yield f"loss is the {'last' if takes_last else 'mean of the last twentieth'} that a run printed{shown}"
        steps = "speeds are compared by `step`, which a script with make() shows"
        yield f"whole run is wall time with imports and generating code; {steps}"
        yield "bytes per parameter are what each first step said, or Adam's where a script is silent (verbose=False)"
    if any(run.records for run in runs):
        yield MEANING
    if any(run.seconds for run in runs):
        model = "this tiny model" if tiny else "the model"
        yield f"step is the forward pass, the backward pass and the update of {model}, on this machine"


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


def recommendation(runs: Sequence[Run], again: str = ALONE) -> str:
    """The cheapest strategy whose loss, from the same seed, is not above fp32's by more than chance or a trifle."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    fp32 = [run for run in runs if run.strategy == "fp32"]
    if not fp32:
        return "no recommendation: fp32 is not among the strategies, and without it there is nothing to judge by"
    if len(seeds) == 1:
        return f"one seed cannot tell a difference from chance: {_with_seeds(again)} gives a recommendation"
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


def _with_seeds(again: str) -> str:
    """The command that trains with three seeds, each given to a script that makes its own."""
    command, dashes, rest = again.partition(" -- ")
    minute = " (about a minute)" if command == ALONE else ""
    return f"`{command} --seeds 0 1 2{dashes}{rest}`{minute}"


def _is_near(apart: Sequence[float], trifle: float) -> bool:
    """Returns True if the mean difference is within twice its standard error, or a trifle; never for NaN or Inf."""
    chance = 2 * spread_of(apart) / math.sqrt(len(apart))
    return all(map(math.isfinite, apart)) and fmean(apart) <= max(trifle, chance)


# The page -------------------------------------------------------------------------------------------------------------

POINTS = 400
"""Maximal number of points of a curve; of more, neighbours are averaged."""


def figure_page(runs: Sequence[Run], heading: str, sentences: Sequence[str]) -> str:
    """The table, and each strategy's loss above that of fp32, over memory and over the run, as HTML.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    logs, several = list(map(as_log, runs)), len({run.seed for run in runs}) > 1
    cards: list[Card] = []
    if memory := loss_over_memory(runs):
        bars = "; bars: the standard deviation between seeds" * several
        compared = " minus that of fp32 from the same seed" * _has_fp32(runs)
        cards.append(("Loss over memory", f"final loss of each strategy{compared}{bars}", memory))
    steps = "number of the printed loss" if is_printed(runs) else "step"
    if difference := above_fp32(logs, steps):
        spread = ", mean over the seeds; shaded: their standard deviation" * several
        note = f"minus the loss of fp32 from the same seed, a running mean{spread}; in the grey band the axis is linear"
        cards.append(("Loss above fp32 over the run", note, difference))
    elif curves := line_chart(CHARTS[0], [log for log in logs if log.about["seed"] == runs[0].seed]):
        curves["layout"]["xaxis"]["title"]["text"] = steps
        cards.append(("Loss over the run", "of the first seed; there is no fp32 to compare with", curves))
    head, rows = cells(runs)
    return document(heading, sentences, html_table(head, rows, assigned(strategies_of(runs))), [cards], "compare")


def as_log(run: Run) -> Log:
    """The losses of a run as a log of at most POINTS steps."""
    size = -(-len(run.losses) // POINTS)
    # Neighbours become their mean, at the step of the first.
    means = {k + 1: fmean(run.losses[k : k + size]) for k in range(0, len(run.losses), size)}
    records = [{"step": step, "loss": mean} for step, mean in means.items()]
    return Log(run.strategy, Path(), {"strategy": run.strategy, "seed": run.seed}, records)


def loss_over_memory(runs: Sequence[Run]) -> Figure | None:
    """A point for each strategy: bytes per parameter, and its final loss, above fp32's where that was trained."""
    names = strategies_of(runs)
    points = [(name, _losses(name, runs), colour) for name, colour in zip(names, assigned(names), strict=True)]
    points = [point for point in points if point[1] and point[0] != UNCOMPILED]
    sizes = {run.strategy: run.bytes_per_parameter for run in runs}
    traces: list[dict[str, Any]] = []
    for name, losses, colour in points:
        spread = stdev(losses) if len(losses) > 1 else 0.0
        traces.append({
            "type": "scatter", "mode": "markers", "name": name, "x": [sizes[name]], "y": [fmean(losses)],
            "error_y": {"type": "data", "array": [spread], "visible": spread > 0, "thickness": 1.2},
            "hovertemplate": f"{name}: %{{y:.4f}} ± {spread:.4f}, %{{x:g}} bytes<extra></extra>", "meta": colour,
            # Later ones are smaller: of points in one place all are seen.
            "marker": {"size": 18 - 12 * len(traces) / len(points)},
        })  # fmt: skip
    vertical = "final loss above fp32" if _has_fp32(runs) else "final loss"
    layout = {"xaxis": {"title": {"text": "bytes per parameter, gradient included"}, "dtick": 2},
              "yaxis": {"title": {"text": vertical}}, "height": 380, "showlegend": True}  # fmt: skip
    return {"data": traces, "layout": layout} if traces else None


def _losses(name: str, runs: Sequence[Run]) -> list[float]:
    """The final losses of a strategy, above those of fp32 where there are such; none if one is not finite."""
    finals = above(name, runs) if _has_fp32(runs) else [run.final for run in runs if run.strategy == name]
    return finals if all(map(math.isfinite, finals)) else []


def _has_fp32(runs: Sequence[Run]) -> bool:
    """Returns True if there is something to compare with fp32."""
    names = strategies_of(runs)
    return "fp32" in names and len(names) > 1
