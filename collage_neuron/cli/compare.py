"""`python -m collage_neuron compare`: trains a script under several strategies, prints a table and what to take.

The script is any that has the changed line. It is a process for each strategy and seed, told by COLLAGE_STRATEGY.
Nothing in it changes, and nothing in the process is replaced: what `compare` knows of a run is what it prints. A loss
is a number after the word `loss`; where a script prints validation losses (`val loss 2.1`), these count alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter

from collage_neuron.cli.compare_results import Run, remarks, table, write_logs
from collage_neuron.conversion.budget import VARIABLE, line_of
from collage_neuron.errors import ScriptError
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
