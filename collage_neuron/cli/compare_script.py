"""Scripts for `compare`: a Python file that defines `make()`.

`make()` returns `model, optimizer, loss` or `model, optimizer, loss, scheduler`: a model and its ordinary optimizer, a
function without arguments that returns the loss of the next batch, and a learning rate scheduler that is stepped after
each step. It is called once for each strategy and seed, after the random generators of Python, NumPy and torch were
seeded, so that all strategies start from the same weights and see the same batches. When the loss is computed, the
model is bf16. `builtin_gpt.py` is such a script.
"""

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import ScriptError
from collage_neuron.optimizer.compiled import Compiled
from collage_neuron.runtime.step_call import needs_one


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
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(f"compared_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ScriptError(f"{path} cannot be imported; name a Python script (.py) that defines make()")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return make_of(module, str(path))


def make_of(module: ModuleType, name: str) -> Callable[[], Made]:
    """The function `make` of a module, wrapped so that its result is checked."""
    make = getattr(module, "make", None)
    if not callable(make):
        raise ScriptError(
            f"{name} defines no make(); add one that returns model, optimizer and a function that returns the next "
            f"batch's loss ({pattern()} is a pattern to copy)"
        )

    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ScriptError(
            f"make() of {name} wants arguments ({error}); compare gives none: let it read sys.argv, or have defaults"
        ) from None

    def checked() -> Made:
        found = make()
        if not isinstance(found, tuple) or len(found) not in (3, 4):
            raise ScriptError(f"make() of {name} returns {_kind(found)}; return model, optimizer, loss[, scheduler]")
        made = Made(*found)
        for value, kind in ((made.model, torch.nn.Module), (made.optimizer, Optimizer)):
            if not isinstance(value, kind):
                raise ScriptError(f"make() of {name} returns {_kind(value)} where a {kind.__name__} belongs")
        if not callable(made.loss):
            raise ScriptError(
                f"make() of {name} returns {_kind(made.loss)} as loss; return a function without arguments that "
                "takes the next batch and returns its loss"
            )
        if made.scheduler is not None and not hasattr(made.scheduler, "step"):
            raise ScriptError(f"make() of {name} returns {_kind(made.scheduler)} as scheduler, which has no step()")
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


def pattern() -> str:
    """The path of a script to copy."""
    return str(Path(__file__).parent / "builtin_gpt.py")


def _kind(value: object) -> str:
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


def failure(error: Exception, path: Path) -> str | None:
    """The message about an error in a script: the traceback from the script on. None if it was raised elsewhere."""
    frames, script = error.__traceback__, path.resolve()
    while frames is not None and Path(frames.tb_frame.f_code.co_filename).resolve() != script:
        frames = frames.tb_next
    if frames is None and not isinstance(error, SyntaxError):
        return None
    hint = ""
    if "bfloat16" in str(error).lower():
        hint = ": the model is bf16 here; give it inputs.to(torch.bfloat16), or run it under torch.autocast"
    return "".join(traceback.format_exception(error.with_traceback(frames))) + f"compare: {path} failed{hint}"


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, torch and, where the script imported it, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def next_loss(made: Made) -> Tensor:
    """The loss of the next batch, checked."""
    loss: Any = made.loss()  # user code: may return anything
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ScriptError(
            f"loss() returns {_kind(loss)} that cannot be trained on; return the batch's loss, one number with a "
            "gradient (without .item() or .detach())"
        )
    return loss
