"""`python -m collage_neuron compare`: trains a model under several strategies, prints a table and what to take."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

import torch
from torch import Tensor

from collage_neuron.api import compile
from collage_neuron.cli import builtin_gpt, user_script
from collage_neuron.cli.compare_results import UNCOMPILED, Run, remarks, table, write_logs
from collage_neuron.cli.user_script import Made, ScriptFailed
from collage_neuron.conversion.budget import VARIABLE
from collage_neuron.errors import ScriptError, UnsafeEnvironment, UnsupportedUpdate
from collage_neuron.explanation import bytes_per_parameter
from collage_neuron.monitoring.monitor import monitor
from collage_neuron.numerics.strategies import STRATEGIES

DEFAULT = ("bf16", "split312", "split412", "split422", "split423", "plus", "split433", "fp32")
"""Pure bf16, fp32 masters, and between them the paper's `plus`, `split312` with the memory of bf16, and the first row
of the table in README.md: what it recommends for any learning rate."""
STEPS = 200
"""The number of steps of a script that defines `make()`, unless `--steps` says another."""
STRETCHES = 20
"""The number of stretches of a run; the host waits for the device, and reads the clock, once in each."""


def train(make: Callable[[], Made], strategy: str, seed: int, steps: int, verbose: bool = True) -> Run:
    """One run of `steps` steps."""
    user_script.seed_everything(seed)
    made, run, size = make(), Run(strategy, seed), math.ceil(steps / STRETCHES)
    watching = None
    if strategy != UNCOMPILED:
        compile_made(made, strategy, verbose)
        watching = monitor(made.optimizer, made.model, every=size)
    device = next(made.model.parameters()).device
    for done in range(0, steps, size):
        count = min(size, steps - done)
        began = perf_counter()
        # They stay on the device until the stretch is over.
        losses = [take_step(made, device) for _ in range(count)]
        run.losses += [loss.item() for loss in losses]  # waits for the device; no step does
        run.seconds.append((perf_counter() - began) / count)
    if watching is not None:
        run.records = watching.history
        run.bytes_per_parameter = bytes_per_parameter(made.optimizer)
    return run


def compile_made(made: Made, strategy: str, verbose: bool = True) -> None:
    """Compiles the model and optimizer of a script; ScriptError if `compile` rejects them."""
    try:
        compile(made.model, made.optimizer, strategy=strategy, verbose=verbose)
    except (TypeError, ValueError, UnsafeEnvironment) as error:
        raise ScriptError(f"strategy {strategy}: {error}") from error


def take_step(made: Made, device: torch.device) -> Tensor:
    """One step of an ordinary training loop; returns the loss."""
    made.optimizer.zero_grad()
    loss = made.loss()
    loss.backward()
    made.optimizer.step()
    if made.scheduler is not None:
        made.scheduler.step()
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()
    return loss.detach()


def compare(make: Callable[[], Made], strategies: Sequence[str], seeds: Sequence[int], steps: int) -> list[Run]:
    """One run for each strategy and seed. The first compiled one says what was compiled, and on which backend."""
    first = next((strategy for strategy in strategies if strategy != UNCOMPILED), None)
    return [
        train(make, strategy, seed, steps, (strategy, seed) == (first, seeds[0]))
        for strategy, seed in _each_run(strategies, seeds)
    ]


def _each_run(strategies: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Each strategy with each seed; says on stderr which is trained now."""
    total = len(strategies) * len(seeds)
    for i, (strategy, seed) in enumerate(product(strategies, seeds), 1):
        print(f"compare: {i} of {total}, {strategy}, seed {seed}", file=sys.stderr, flush=True)
        yield strategy, seed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `compare`."""
    add = parser.add_argument
    help_of_script = (
        "a Python file that has the changed line and prints its loss as `loss 2.345` (of several, the last one printed "
        "counts; of 40 or more, the mean of the last twentieth; validation losses count alone): it is run once for "
        f"each strategy and seed, so {len(DEFAULT)} times by default. Or one that defines make(), whose losses need no "
        "print. Default: a tiny built-in GPT. The script's own arguments follow after --, where {seed} stands for the "
        "seed"
    )
    add("script", nargs="?", type=Path, help=help_of_script)
    known = ", ".join([*STRATEGIES, UNCOMPILED])
    help_of_strategies = f"any of {known}, or that the script registers (default: {' '.join(DEFAULT)})"
    add("--strategies", nargs="+", default=DEFAULT, metavar="NAME", help=help_of_strategies)
    add("--steps", type=positive, help=f"training steps of a script that defines make() (default: {STEPS})")
    add("--seeds", type=seed, nargs="+", default=[0], help="each strategy is trained with each (default: 0)")
    add("--out", type=Path, default=Path("compare"), help="a folder for logs and outputs (default: %(default)s)")


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps: give 1 or more")
    return int(text)


def seed(text: str) -> int:
    """An argparse type: a seed that the generators of torch and NumPy both take."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed: give 0 to {2**32 - 1}")
    return int(text)


def main(options: argparse.Namespace, arguments: Sequence[str] = ()) -> int:
    """Runs the comparison and prints it; `arguments` are the script's own. Returns the exit status."""
    strategies, seeds = list(dict.fromkeys(options.strategies)), list(dict.fromkeys(options.seeds))
    try:
        if options.script and options.script.is_file() and not user_script.has_make(options.script):
            runs = _processes(options, strategies, seeds, arguments)
        else:
            runs = _made(options, strategies, seeds, arguments)
    except (ScriptError, UnsupportedUpdate) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 1 if isinstance(error, ScriptFailed) else 2
    except Exception as error:  # whatever a script raises
        said = user_script.failure(error, options.script) if options.script else None
        if said is None:
            raise
        print(said, file=sys.stderr)
        return 1
    print(table(runs))
    *rest, advice = remarks(runs)
    write_logs(runs, options.out)
    print("\n".join(["", *rest, f"Charts: `collage_neuron report {options.out}`.", advice]))
    return 0


def _made(
    options: argparse.Namespace, strategies: Sequence[str], seeds: Sequence[int], rest: Sequence[str]
) -> list[Run]:
    """The runs of a script that defines `make()`, in this process."""
    if VARIABLE in os.environ:
        raise ScriptError(f"{VARIABLE} is set, and would override every strategy that is to be compared: unset it")
    path = options.script
    make = user_script.load_script(path, rest) if path else user_script.make_of(builtin_gpt, "builtin_gpt")
    if unknown := [name for name in strategies if name not in (*STRATEGIES, UNCOMPILED)]:
        raise ScriptError(
            f"unknown strategy {unknown[0]!r}; choose from {', '.join([*STRATEGIES, UNCOMPILED])}, or let the script "
            "import what registers yours in collage_neuron.extend.STRATEGIES"
        )
    _make_folder(options.out)
    return compare(make, strategies, seeds, options.steps or STEPS)


def _processes(
    options: argparse.Namespace, strategies: Sequence[str], seeds: Sequence[int], rest: Sequence[str]
) -> list[Run]:
    """The runs of a script that has the changed line."""
    user_script.check_request(options.script, strategies, seeds, rest, options.steps)
    _make_folder(options.out)
    unknown_first = sorted(strategies, key=STRATEGIES.__contains__)  # a misspelt name fails before anything is trained
    runs = [
        user_script.run_process(options.script, rest, strategy, seed, options.out / f"{strategy}-{seed}.txt")
        for strategy, seed in _each_run(unknown_first, seeds)
    ]
    return sorted(runs, key=lambda run: strategies.index(run.strategy))


def _make_folder(folder: Path) -> None:
    """Makes the folder for logs and outputs, before anything is trained; ScriptError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ScriptError(f"{folder} cannot be written ({error.strerror}); name a folder with --out") from None
