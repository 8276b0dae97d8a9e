"""`compare` of a script that has the changed line: a process for each strategy, told by COLLAGE_STRATEGY.

Nothing in the script changes, and nothing in the process is replaced: what `compare` knows of a run is what it prints.
A loss is a number after the word `loss`; where a script prints validation losses (`val loss 2.1`), these count alone.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

from collage_neuron.cli.compare_script import pattern
from collage_neuron.cli.compare_table import UNCOMPILED, Run
from collage_neuron.conversion.override import VARIABLE, line_of
from collage_neuron.errors import ScriptError
from collage_neuron.numerics.strategies import STRATEGIES, bytes_with_adam

NUMBER = r"[^\w\n\r]{0,4}?([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan\b|[-+]?inf\b)"
VALIDATION = re.compile(rf"\b(?:val|valid|validation|eval)[ _-]loss\b{NUMBER}", re.IGNORECASE)
TRAINING = re.compile(rf"(?<![\w-])(?:train(?:ing)?(?: |_(?=loss=)))?loss\b{NUMBER}", re.IGNORECASE)
"""How losses are printed: `loss 2.3`, `loss=2.3`, `{'loss': 2.3}`, `train loss: 2.3`; not the `'train_loss'` of
Hugging Face, a mean over the whole run."""

SEED = "{seed}"
"""Stands for the seed in the arguments of a script."""

SHOWN = 15
"""The number of lines of a failed process that are shown."""


class ScriptFailed(ScriptError):
    """The script itself failed: what it said is in the message."""


def has_make(path: Path) -> bool:
    """Returns True if the script defines, or imports, a name `make`; also if it cannot be parsed."""
    try:
        body = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return True  # what is wrong with it is said where it is loaded
    return any("make" in _names(node) for node in body)


def _names(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)
    else:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def check_request(
    path: Path, strategies: Sequence[str], seeds: Sequence[int], arguments: Sequence[str], steps: int | None
) -> None:
    """Raises ScriptError for what a process cannot be asked for."""
    if UNCOMPILED in strategies:
        raise ScriptError(f"a script with the changed line always compiles: leave out {UNCOMPILED}, or define make()")
    if steps is not None:
        raise ScriptError(f"{path} defines no make(), which --steps is for; give it its own option, after --")
    if seeds != [0] and not any(SEED in argument for argument in arguments):
        raise ScriptError(f"the script's own option for a seed is not known; write it after --, as: -- --seed {SEED}")


def run_process(path: Path, arguments: Sequence[str], strategy: str, seed: int, out: Path) -> Run:
    """Runs the script as it is, with its output in `out`; ScriptError if it fails, or prints no loss.

    Raises:
        ScriptError: the process failed, did not compile with this strategy, or printed no loss.
    """
    command = [sys.executable, str(path), *(argument.replace(SEED, str(seed)) for argument in arguments)]
    began = perf_counter()
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        environment = {**os.environ, VARIABLE: strategy, "PYTHONUNBUFFERED": "1"}
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    seconds = perf_counter() - began
    text = out.read_text(errors="replace")
    if status != 0:
        tail = "\n".join(text.splitlines()[-SHOWN:])
        raise ScriptFailed(f"{out} ends with\n{tail}\ncompare: {path} failed under {strategy} with status {status}")
    if line_of(strategy) not in text:
        raise ScriptError(
            f"{path} defines no make(), and did not say that it compiles with {VARIABLE}={strategy}: it calls no "
            "collage_neuron.compile(), or hides warnings of the log 'collage_neuron'. Add the changed line, or make() "
            f"({pattern()} is a pattern to copy); what it said is in {out}"
        )
    losses, loss_line = losses_in(text), last_line_in(text)
    if not losses:
        raise ScriptError(f"{path} prints no loss; print one as `loss 2.345` (what it printed is in {out})")
    return Run(strategy, seed, bytes_in(text, strategy), losses, whole=seconds, loss_line=loss_line)


def bytes_in(text: str, strategy: str) -> float:
    """What the line after the first step says of a parameter; where a script is silent (`verbose=False`), Adam's."""
    found = re.findall(rf"strategy {re.escape(strategy)}(?: \(.*?\))?, ([\d.]+) B each", text)
    if not found and strategy not in STRATEGIES:
        raise ScriptError(
            f"the bytes of {strategy}, which the script registers, are not known: drop verbose=False there"
        )
    return float(found[-1]) if found else bytes_with_adam(strategy)


def losses_in(text: str) -> list[float]:
    """The losses that a script printed: those of validation if there are any, else all."""
    return [float(found[1]) for found in _printed_in(text)]


def last_line_in(text: str) -> str:
    """The line that has the last of the losses; of a progress bar, what it showed last."""
    found = _printed_in(text)
    lines = re.split(r"[\r\n]", text[: found[-1].end()])[-1:] if found else []
    return "".join(lines).strip()


def _printed_in(text: str) -> list[re.Match[str]]:
    return list(VALIDATION.finditer(text)) or list(TRAINING.finditer(text))
