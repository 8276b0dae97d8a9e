"""`python -m collage_neuron compare`: trains a model under several strategies from the same seed, prints a table."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from collage_neuron.api import compile
from collage_neuron.cli import builtin_gpt
from collage_neuron.cli.compare_script import Made, failure, load_script, make_of, next_loss, seed_everything
from collage_neuron.errors import ScriptError, UnsafeEnvironment, UnsupportedUpdate
from collage_neuron.explain import bytes_per_parameter
from collage_neuron.monitoring.metrics import Record
from collage_neuron.monitoring.monitor import monitor
from collage_neuron.numerics.strategies import STRATEGIES

UNCOMPILED = "uncompiled"
"""The name of the run with the model and optimizer as the script made them."""

DEFAULT = ("bf16", "light", "plus", "fp32")
STRETCHES = 20
"""The number of stretches of a run; the host waits for the device, and reads the clock, once in each."""


@dataclass
class Run:
    """One training run: a loss per step, seconds per step for each stretch, and the measured updates."""

    strategy: str
    seed: int
    bytes_per_parameter: float = math.nan
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

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


def train(
    make: Callable[[], Made], strategy: str, seed: int, steps: int, tick: Callable[[int], object] = lambda n: None
) -> Run:
    """One run of `steps` steps; calls `tick` with the number of steps taken."""
    seed_everything(seed)
    made, run = make(), Run(strategy, seed)
    watching = None
    if strategy != UNCOMPILED:
        compile_made(made, strategy)
        watching = monitor(made.optimizer, made.model, every=math.ceil(steps / STRETCHES))
    device = next(made.model.parameters()).device
    size = math.ceil(steps / STRETCHES)
    for done in range(0, steps, size):
        count = min(size, steps - done)
        began = perf_counter()
        losses = [take_step(made, device) for _ in range(count)]
        run.losses += [loss.item() for loss in losses]  # waits for the device; no step does
        run.seconds.append((perf_counter() - began) / count)
        tick(count)
    if watching is not None:
        run.records = watching.history
        run.bytes_per_parameter = bytes_per_parameter(made.optimizer)
    return run


def compile_made(made: Made, strategy: str) -> None:
    """Compiles the model and optimizer of a script; ScriptError if `compile` rejects them."""
    try:
        compile(made.model, made.optimizer, strategy=strategy)
    except (TypeError, ValueError, UnsafeEnvironment) as error:
        raise ScriptError(f"strategy {strategy}: {error}") from error


def take_step(made: Made, device: torch.device) -> Tensor:
    """One step of an ordinary training loop; returns the loss."""
    made.optimizer.zero_grad()
    loss = next_loss(made)
    loss.backward()
    made.optimizer.step()
    if made.scheduler is not None:
        made.scheduler.step()
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
    return loss.detach()


def compare(
    make: Callable[[], Made],
    strategies: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    tick: Callable[[int], object] = lambda n: None,
) -> list[Run]:
    """One run for each strategy and seed."""
    return [train(make, strategy, seed, steps, tick) for strategy in strategies for seed in seeds]


def table(runs: Sequence[Run]) -> str:
    """The comparison as aligned text: one row per strategy, with means over its seeds."""
    head = ("strategy", "bytes/parameter", "loss", "above fp32", "EDQ", "lost updates", "step")
    rows = [head, *(_row(strategy, runs) for strategy in dict.fromkeys(run.strategy for run in runs))]
    kept = [i for i in range(len(head)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    return "\n".join("  ".join(row[i].rjust(widths[i]) for i in kept) for row in rows)


def _row(strategy: str, runs: Sequence[Run]) -> tuple[str, ...]:
    own = [run for run in runs if run.strategy == strategy]
    return (
        strategy,
        _cell(own[0].bytes_per_parameter, "{:.1f}"),
        f"{fmean(run.final for run in own):.4f}",
        _differences(above(strategy, runs)),
        _cell(_mean([run.edq for run in own]), "{:.4f}"),
        _cell(_mean([run.lost for run in own]), "{:.2f} %"),
        f"{1e3 * median(s for run in own for s in run.seconds):.1f} ms",
    )


def above(strategy: str, runs: Sequence[Run]) -> list[float]:
    """For each seed, the final loss minus that of fp32 with the same seed."""
    fp32 = {run.seed: run.final for run in runs if run.strategy == "fp32"}
    return [run.final - fp32[run.seed] for run in runs if run.strategy == strategy and run.seed in fp32]


def _differences(found: Sequence[float]) -> str:
    if not found:
        return ""
    spread = f" ± {stdev(found):.4f}" if len(found) > 1 else ""
    return f"{fmean(found):+.4f}{spread}"


def _cell(value: float, form: str) -> str:
    return "" if math.isnan(value) else form.format(value)


def _mean(values: Sequence[float]) -> float:
    known = [x for x in values if not math.isnan(x)]
    return fmean(known) if known else math.nan


def remarks(runs: Sequence[Run]) -> list[str]:
    """Notes below the table: whether the runs are comparable, and which differences are noise."""
    found = []
    for seed in dict.fromkeys(run.seed for run in runs):
        first = [run.losses[0] for run in runs if run.seed == seed and run.strategy != UNCOMPILED]
        if any(not math.isclose(x, first[0], rel_tol=1e-3) for x in first):
            found.append(
                f"the runs with seed {seed} do not start alike (first losses {', '.join(f'{x:.4f}' for x in first)}): "
                "make() draws from something that is not seeded, or reads its data on; the rows cannot be compared"
            )
    seeds = {run.seed for run in runs}
    fp32 = [run.final for run in runs if run.strategy == "fp32"]
    if len(seeds) == 1:
        found.append("one seed: run with `--seeds 0 1 2` to see which differences are chance")
    elif fp32:
        spread = stdev(fp32)
        near = [r for r in runs if r.strategy != UNCOMPILED and abs(fmean(above(r.strategy, runs))) <= spread]
        least = min(near, key=lambda run: run.bytes_per_parameter)
        found.append(
            f"fp32's own losses differ by {spread:.4f} between seeds; the smallest strategy whose mean is as near to "
            f"fp32's: {least.strategy}, {least.bytes_per_parameter:g} bytes a parameter"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `compare`."""
    add = parser.add_argument
    help_of_script = (
        "a Python file that defines make() (default: a tiny built-in GPT); its own arguments follow after --"
    )
    add("script", nargs="?", type=Path, help=help_of_script)
    known = f"any of {', '.join([*STRATEGIES, UNCOMPILED])} (default: {' '.join(DEFAULT)})"
    add("--strategies", nargs="+", choices=[*STRATEGIES, UNCOMPILED], default=DEFAULT, metavar="NAME", help=known)
    add("--steps", type=positive, default=200, help="training steps (default: %(default)s)")
    add("--seeds", type=seed, nargs="+", default=[0], help="each strategy is trained with each (default: 0)")


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of steps: give 1 or more")
    return number


def seed(text: str) -> int:
    """An argparse type: a seed that the generators of torch and NumPy both take."""
    if not 0 <= (number := int(text)) < 2**32:
        raise argparse.ArgumentTypeError(f"{number} is not a seed: give 0 to {2**32 - 1}")
    return number


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Runs the comparison and prints it; `arguments` are the script's own. Returns the exit status."""
    strategies, seeds = list(dict.fromkeys(options.strategies)), list(dict.fromkeys(options.seeds))
    try:
        make = load_script(options.script, arguments) if options.script else make_of(builtin_gpt, "builtin_gpt")
        with _progress(len(strategies) * len(seeds) * options.steps) as bar:
            runs = compare(make, strategies, seeds, options.steps, bar.update)
    except (ScriptError, UnsupportedUpdate) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # whatever a script raises
        said = failure(error, options.script) if options.script else None
        if said is None:
            raise
        print(said, file=sys.stderr)
        return 1
    print(table(runs))
    print("\n".join(["", *remarks(runs)]))
    return 0


class _NoBar(nullcontext[Any]):
    """Stands in for a progress bar where tqdm is not installed."""

    def __enter__(self) -> _NoBar:
        return self

    def update(self, steps: int) -> None:
        pass


def _progress(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, unit="step", desc="compare")
