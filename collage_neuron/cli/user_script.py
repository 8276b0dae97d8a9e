"""The script that `compare` trains: a Python file that defines `make()`, or any that has the changed line.

`make()` returns `model, optimizer, loss` or `model, optimizer, loss, scheduler`: a model and its ordinary optimizer, a
function without arguments that returns the loss of the next batch, and a learning rate scheduler that is stepped after
each step. It is called once for each strategy and seed, after the random generators of Python, NumPy and torch were
seeded, so that all strategies start from the same weights and see the same batches. When the loss is computed, the
model is bf16. `builtin_gpt.py` is such a script.

Any other script is a process for each strategy, told by COLLAGE_STRATEGY. Nothing in it changes, and nothing in the
process is replaced: what `compare` knows of a run is what it prints. A loss is a number after the word `loss`; where a
script prints validation losses (`val loss 2.1`), these count alone.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import symtable
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.cli.compare_results import UNCOMPILED, Run
from collage_neuron.conversion.budget import VARIABLE, line_of
from collage_neuron.errors import ScriptError
from collage_neuron.numerics.strategies import STRATEGIES, bytes_with_adam
from collage_neuron.optimizer.compiled import Compiled
from collage_neuron.runtime.step_call import needs_one

PATTERN = Path(__file__).parent / "builtin_gpt.py"
"""A script to copy."""


class ScriptFailed(ScriptError):
    """The script itself failed: what it said is in the message."""


class Made(NamedTuple):
    """The model, optimizer, loss function and scheduler that a script's `make` returns."""

    model: torch.nn.Module
    optimizer: Optimizer
    loss: Callable[[], Tensor]
    scheduler: Any = None


def load_script(path: Path, arguments: Sequence[str]) -> Callable[[], Made]:
    """Runs a script as `python SCRIPT ARGUMENTS` would, except that it is not `__main__`; returns its `make`."""
    if not path.is_file():
        raise ScriptError(f"{path} is not a file; name a Python script that has the changed line, or defines make()")
    sys.argv = [str(path), *arguments]
    # As Python does for a script: the modules beside it are found.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"compared_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScriptError(f"{path} cannot be imported; name a Python script (.py) that defines make()")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look there for the module of a class.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return make_of(module, str(path))


def make_of(module: ModuleType, name: str) -> Callable[[], Made]:
    """The function `make` of a module, wrapped so that its result is checked."""
    make = getattr(module, "make", None)
    if not callable(make):
        raise ScriptError(
            f"{name} defines no make(); add one that returns model, optimizer and a function that returns the next "
            f"batch's loss ({PATTERN} is a pattern to copy)"
        )

    def checked() -> Made:
        result = make()
        parts = result if isinstance(result, tuple) else ()
        wanted: tuple[Any, ...] = (torch.nn.Module, Optimizer, Callable, object)
        if len(parts) not in (3, 4) or not all(map(isinstance, parts, wanted)):
            raise ScriptError(
                f"make() of {name} returns {result!r:.300}; return model, optimizer, a function without arguments that "
                "returns the next batch's loss, and a scheduler if there is one"
            )
        made = Made(*parts)
        _check_optimizer(name, made.optimizer)
        return made

    return checked


def _check_optimizer(name: str, optimizer: Optimizer) -> None:
    if needs_one(optimizer):
        raise ScriptError(
            f"{type(optimizer).__name__} cannot be compiled and compared here: its step() needs a closure, and the "
            "loop of compare calls it without one; compare a script with a loop of its own, which has no make()"
        )
    if isinstance(optimizer, Compiled):
        raise ScriptError(f"make() of {name} compiles its optimizer; leave that line out, compare adds it")


def failure(error: Exception, path: Path) -> str | None:
    """The message about an error in a script: the traceback from the script on. None if it was raised elsewhere."""
    frames, script = error.__traceback__, path.resolve()
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).resolve() != script:
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return None
    hint = ": the model is bf16 here; give it inputs.to(torch.bfloat16), or run it under torch.autocast"
    hint *= "bfloat16" in str(error).lower()
    return "".join(traceback.format_exception(error.with_traceback(frames))) + f"compare: {path} failed{hint}"


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, torch and, where the script imported it, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# A process for each run -----------------------------------------------------------------------------------------------

NUMBER = r"[^\w\n\r]{0,4}?[ \t]*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?|nan\b|[-+]?inf\b)"
VALIDATION = re.compile(rf"\b(?:val|valid|validation|eval)[ _-]loss\b{NUMBER}", re.IGNORECASE)
TRAINING = re.compile(rf"(?<![\w-])(?:train(?:ing)?(?: |_(?=loss=)))?loss\b{NUMBER}", re.IGNORECASE)
"""How losses are printed: `loss 2.3`, `loss=2.3`, `{'loss': 2.3}`, `train loss: 2.3`; not the `'train_loss'` of
Hugging Face, a mean over the whole run."""

SEED = "{seed}"
"""Stands for the seed in the arguments of a script."""

SHOWN = 15
"""The number of lines of a failed process that are shown."""


def has_make(path: Path) -> bool:
    """Returns True if the script defines, or imports, a name `make`; also if it cannot be parsed."""
    try:
        top = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
    except (OSError, SyntaxError, ValueError):
        return True  # what is wrong with it is said where it is loaded
    return any(name.get_name() == "make" and (name.is_assigned() or name.is_imported()) for name in top)


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
    with out.open("wb") as file:
        # Unbuffered, so that what was printed before an error is in the file.
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
            f"({PATTERN} is a pattern to copy); what it said is in {out}"
        )
    if not (losses := losses_in(text)):
        raise ScriptError(f"{path} prints no loss; print one as `loss 2.345` (what it printed is in {out})")
    return Run(strategy, seed, bytes_in(text, strategy), losses, whole=seconds)


def bytes_in(text: str, strategy: str) -> float:
    """What the line after the first step says of a parameter; where a script is silent (`verbose=False`), Adam's."""
    sizes = re.findall(rf"strategy {re.escape(strategy)}(?: \(.*?\))?, ([\d.]+) B each", text)
    if not sizes and strategy not in STRATEGIES:
        raise ScriptError(
            f"the bytes of {strategy}, which the script registers, are not known: drop verbose=False there"
        )
    return float(sizes[-1]) if sizes else bytes_with_adam(strategy)


def losses_in(text: str) -> list[float]:
    """The losses that a script printed: those of validation if there are any, else all."""
    found = list(VALIDATION.finditer(text)) or TRAINING.finditer(text)
    return [float(match[1].replace(",", "")) for match in found]
