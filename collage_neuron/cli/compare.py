"""`python -m collage_neuron compare`: trains a script under several strategies, prints a table and what to take.

The script is any that has the changed line. It is a process for each strategy and seed, told by COLLAGE_STRATEGY.
Nothing in it changes, and nothing in the process is replaced: what `compare` knows of a run is what it prints. A loss
is a number after the word `loss`; where a script prints validation losses (`val loss 2.1`), these count alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryFile
from time import perf_counter

from collage_neuron.conversion.budget import VARIABLE, line_of
from collage_neuron.errors import ScriptError
from collage_neuron.monitoring.writers import plain
from collage_neuron.numerics.strategies import STRATEGIES, bytes_with_adam

DEFAULT = ("bf16", "split312", "split412", "split422", "split423", "plus", "split433", "fp32")
"""Pure bf16, fp32 masters, and between them the paper's `plus`, `split312` with the memory of bf16, and the first row
of the table in README.md: what it recommends for any learning rate."""

BUILT_IN = ("-m", "collage_neuron.cli.builtin_gpt")
"""What Python runs without a script."""

SEED = "{seed}"
"""Stands for the seed in the arguments of a script."""

SHOWN = 15
"""The number of lines of a failed process that are shown."""


class ScriptFailed(ScriptError):
    """The script itself failed: what it said is in the message."""


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `compare`."""
    add = parser.add_argument
    help_of_script = (
        "a Python file that has the changed line and prints its loss as `loss 2.345` (of several, the last one printed "
        "counts; of 40 or more, the mean of the last twentieth; validation losses count alone): it is run once for "
        f"each strategy and seed, so {len(DEFAULT)} times by default. Default: a tiny built-in GPT. The script's own "
        "arguments follow after --, where {seed} stands for the seed"
    )
    add("script", nargs="?", type=Path, help=help_of_script)
    help_of_strategies = f"any of {', '.join(STRATEGIES)}, or that the script registers (default: {' '.join(DEFAULT)})"
    add("--strategies", nargs="+", default=DEFAULT, metavar="NAME", help=help_of_strategies)
    add("--seeds", type=seed, nargs="+", default=[0], help="each strategy is trained with each (default: 0)")
    add("--out", type=Path, default=Path("compare"), help="a folder for logs and outputs (default: %(default)s)")


def seed(text: str) -> int:
    """An argparse type: a seed that the generators of torch and NumPy both take."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: give 0 to {2**32 - 1}")
    return int(text)


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Runs the comparison and prints it; `arguments` are the script's own. Returns the exit status."""
    strategies, seeds = list(dict.fromkeys(options.strategies)), list(dict.fromkeys(options.seeds))
    first = [*BUILT_IN, "--seed", SEED] if options.script is None else [str(options.script)]
    command = [*first, *arguments]
    try:
        _check(options, seeds, command)
        # First what is not known: a misspelt name fails before anything is trained.
        unknown_first = sorted(strategies, key=STRATEGIES.__contains__)
        runs = [run_process(command, *each, options.out) for each in _each_run(unknown_first, seeds)]
    except ScriptError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1 if isinstance(error, ScriptFailed) else 2
    runs.sort(key=lambda run: strategies.index(run.strategy))
    write_logs(runs, options.out)
    print("\n".join([table(runs), "", f"Charts: `collage_neuron report {options.out}`.", *remarks(runs)]))
    return 0


def _check(options: argparse.Namespace, seeds: Sequence[int], command: Sequence[str]) -> None:
    """Raises ScriptError for what a process cannot be asked for; makes the folder, before anything is trained."""
    if options.script is not None and not options.script.is_file():
        raise ScriptError(f"{options.script} is not a file; name a Python script that has the changed line")
    if seeds != [0] and not any(SEED in argument for argument in command):
        raise ScriptError(f"the script's own option for a seed is not known; write it after --, as: -- --seed {SEED}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=options.out).close()
    except OSError as error:
        raise ScriptError(f"{options.out} cannot be written ({error.strerror}); name a folder with --out") from None


def _each_run(strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each strategy with each seed; says on stderr which is trained now."""
    total = len(strategies) * len(seeds)
    for i, (strategy, seed) in enumerate(product(strategies, seeds), 1):
        print(f"compare: {i} of {total}, {strategy}, seed {seed}", file=sys.stderr, flush=True)
        yield strategy, seed


def run_process(given: Sequence[str], strategy: str, seed: int, folder: Path) -> Run:
    """Runs the script as it is, with its output in the folder.

    Raises:
        ScriptError: the process failed, did not compile with this strategy, or printed no loss.
    """
    command = [sys.executable, *(argument.replace(SEED, str(seed)) for argument in given)]
    out, began = folder / f"{strategy}-{seed}.txt", perf_counter()
    script = "the built-in GPT" if given[0] in BUILT_IN else given[0]
    with out.open("wb") as file:
        # Unbuffered, so that what was printed before an error is in the file.
        environment = {**os.environ, VARIABLE: strategy, "PYTHONUNBUFFERED": "1"}
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = perf_counter() - began
    text = out.read_text(errors="replace")
    if status != 0:
        tail = "\n".join(text.splitlines()[-SHOWN:])
        raise ScriptFailed(f"{out} ends with\n{tail}\ncompare: {script} failed under {strategy} with status {status}")
    if line_of(strategy) not in text:
        raise ScriptError(
            f"{script} did not say that it compiles with {VARIABLE}={strategy}: it calls no collage_neuron.compile(), "
            f"or hides warnings of the log 'collage_neuron'. Add the changed line; what it said is in {out}"
        )
    if not (losses := losses_in(text)):
        raise ScriptError(f"{script} prints no loss; print one as `loss 2.345` (what it printed is in {out})")
    return Run(strategy, seed, bytes_in(text, strategy), losses, seconds)


def bytes_in(text: str, strategy: str) -> float:
    """What the line after the first step says of a parameter; where a script is silent (`verbose=False`), Adam's."""
    sizes = re.findall(rf"strategy {re.escape(strategy)}(?: \(.*?\))?, ([\d.]+) B each", text)
    if not sizes and strategy not in STRATEGIES:
        raise ScriptError(
            f"the bytes of {strategy}, which the script registers, are not known: drop verbose=False there"
        )
    return float(sizes[-1]) if sizes else bytes_with_adam(strategy)


NUMBER = r"[^\w\n\r]{0,4}?[ \t]*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?|nan\b|[-+]?inf\b)"
VALIDATION = re.compile(rf"\b(?:val|valid|validation|eval)[ _-]loss\b{NUMBER}", re.IGNORECASE)
TRAINING = re.compile(rf"(?<![\w-])(?:train(?:ing)?(?: |_(?=loss=)))?loss\b{NUMBER}", re.IGNORECASE)
"""How losses are printed: `loss 2.3`, `loss=2.3`, `{'loss': 2.3}`, `train loss: 2.3`; not the `'train_loss'` of
Hugging Face, a mean over the whole run."""


def losses_in(text: str) -> list[float]:
    """The losses that a script printed: those of validation if there are any, else all."""
    found = list(VALIDATION.finditer(text)) or TRAINING.finditer(text)
    return [float(match[1].replace(",", "")) for match in found]


# What the runs show ---------------------------------------------------------------------------------------------------


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
