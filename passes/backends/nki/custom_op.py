"""The operators that run a kernel: one that returns what the kernel wrote, and one that changes its arguments.

torch-xla rejects operators that change their arguments, so `collage_neuron::update_tensors` returns the results. In
torch-xla's graph the kernel becomes a custom call; `copy_` of the results into the old tensors lets the call reuse
their buffers. TorchNeuron documents the other form, without results: an operator of `nki_op` that declares what its
kernel writes to. `works_in_place` is the one place that chooses.

NKI's compiler reads the source of a kernel from a file. Its folder belongs to the user and is closed to others, and a
file is used only if it has exactly the generated text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.errors import NoMachine, UnsafeFolder
from collage_neuron.passes.backends.nki.target import DIALECTS
from collage_neuron.passes.backends.torch_neuron import NAME

FOLDER = "COLLAGE_NEURON_CACHE"
"""The environment variable that names another folder."""


def folder() -> Path:
    """The folder: `$COLLAGE_NEURON_CACHE`, else `collage_neuron` in the user's cache folder. Created if missing.

    Raises:
        UnsafeFolder: it belongs to another user, or others may write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(os.environ.get(FOLDER) or Path(base) / "collage_neuron")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFolder(
            f"{path}, where generated kernels are kept, can be written by other users: chmod 700 it, or name another "
            f"folder in {FOLDER}"
        )
    return path


def load(name: str, source: str) -> ModuleType:
    """Runs `source` as the module `name`, with its text in a file of the folder."""
    path = folder() / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    if not path.is_file() or path.read_text() != source:
        _write(path, source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where NKI's compiler finds the globals of a function
    exec(compile(source, str(path), "exec"), module.__dict__)  # the text itself: the file may have changed since
    return module


def _write(path: Path, source: str) -> None:
    """Writes a file atomically: another process that starts at the same time reads all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # for the owner alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


# Kernels by key


class Program(NamedTuple):
    """A kernel that is registered with the operator under a key."""

    name: str
    source: str
    written: Sequence[int]
    """The indices of the tensors that it changes and returns."""
    cores: int = 1
    """The physical cores that run it."""


IN_PLACE = "COLLAGE_NEURON_IN_PLACE"
"""The environment variable that is 0 where a device should return results, which are then copied."""

KEPT = 64
"""Programs that are kept: a step with other parameters that have gradients is another program."""

_programs: dict[str, Program] = {}


def register(key: str, program: Program) -> None:
    """Registers a kernel with the operator, which forgets the one that was registered longest ago beyond `KEPT`."""
    # A dictionary keeps the order of insertion, so a key that is used again has to be put at its end.
    _programs.pop(key, None)
    _programs[key] = program
    if len(_programs) > KEPT:
        del _programs[next(iter(_programs))]


@lru_cache(KEPT)
def function(key: str) -> Callable[..., Any]:
    """The kernel function, imported when it first runs."""
    name, source, _, cores = _programs[key]
    loaded: Any = getattr(load(name, source), name)
    return loaded if cores == 1 else loaded[cores]  # type: ignore[no-any-return]  # NKI's


def _results(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


@torch.library.custom_op("collage_neuron::update_tensors", mutates_args=())
def update_tensors(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Runs a registered kernel on `tensors` and the `[128, K]` scalar inputs; returns what it writes, in order."""
    raise NotImplementedError(f"no NKI kernel runs on {tensors[0].device}")


@update_tensors.register_kernel("cpu")
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Simulated, by `nki.simulate`."""
    # A simulated kernel writes to its inputs, and the operator declares that it changes none: it works on copies.
    nki = DIALECTS["nki"]()
    simulated = function(kernel) if nki is None else nki.simulate(function(kernel))
    return [r.clone() for r in _results(simulated(*(t.clone() for t in tensors), *scalars))]


@update_tensors.register_fake
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    return [torch.empty_like(tensors[i]) for i in _programs[kernel].written]


@update_tensors.register_kernel(("xla", "privateuseone"))
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Runs the kernel through the device plug-in."""
    return _results(function(kernel)(*tensors, *scalars))


def works_in_place(device: torch.device) -> bool:
    """Returns True if kernels change their arguments on `device`, and False if they return results."""
    return device.type == NAME and os.environ.get(IN_PLACE, "1") != "0"


def update_in_place(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Runs a registered kernel, which changes some of `tensors`; returns these, in order."""
    written = _programs[kernel].written
    changed, places = [tensors[i] for i in written], set(written)
    in_place_operator()(changed, [*(t for i, t in enumerate(tensors) if i not in places), *scalars], kernel)
    return changed


@cache
def in_place_operator() -> Callable[[list[Tensor], list[Tensor], str], None]:
    """The operator of TorchNeuron that changes its first argument.

    Raises:
        NoMachine: torch_neuronx is not installed, or has no `nki_op`.
    """
    try:
        from torch_neuronx import nki_op
    except ImportError as error:
        raise NoMachine(
            f"kernels on the device {NAME!r} are called through torch_neuronx.nki_op, which is not here ({error}): "
            f"install torch-neuronx 2.13 or newer (Neuron SDK 2.33), or set {IN_PLACE}=0"
        ) from error
    made: Any = nki_op("collage_neuron::update_in_place", mutates_args={"written"})(_run_in_place)
    return made  # type: ignore[no-any-return]  # torch_neuronx's


def _run_in_place(written: Sequence[Tensor], read: Sequence[Tensor], kernel: str) -> None:
    places, others, changed = set(_programs[kernel].written), iter(read), iter(written)
    tensors = (next(changed if i in places else others) for i in range(len(written) + len(read)))
    function(kernel)(*tensors)
