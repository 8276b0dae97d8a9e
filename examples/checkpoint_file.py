"""A checkpoint file that is whole at any moment, whatever kills the program: the old one, or the new one."""

import errno
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class CheckpointError(ValueError):
    """A file that cannot be gone on from; the message says what, where and what to do."""


def save(state: dict[str, Any], path: Path) -> None:
    """Write tensors, numbers, texts and containers of them; device tensors are copied to the host."""
    state = tree_map_only(Tensor, lambda t: t.detach().cpu(), state)
    with _replacing(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any]:
    """Read a file of ``save``, with ``weights_only``: nothing in it is run. Raises CheckpointError."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # which is torch, looking before the beginning
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        why = (str(error).strip() or "it is empty").splitlines()[0]
        raise CheckpointError(f"{path} is truncated, or no checkpoint ({why}): delete it to start anew") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} and no checkpoint: delete it to start anew")
    return found


@dataclass(frozen=True)
class Checkpoint:
    """The file of one run, and the settings that the run depends on: it is gone on with under the same only."""

    path: Path
    settings: dict[str, Any]

    def save(self, parts: dict[str, Any], **more: Any) -> None:
        """Write the ``state_dict()`` of every part, and what else is given."""
        states = {name: part.state_dict() for name, part in parts.items()}
        save({"settings": self.settings, "parts": states, **more}, self.path)

    def restore(self, parts: dict[str, Any]) -> dict[str, Any] | None:
        """Load the parts in their order and return all of the file; None where there is no file yet."""
        if not self.path.exists():
            return None
        saved = load(self.path)
        missing = [name for name in ("settings", "parts") if name not in saved]
        missing += [f"parts[{name!r}]" for name in parts if not missing and name not in saved["parts"]]
        if missing:
            raise CheckpointError(f"{self.path} has no {missing[0]}: is it truncated, or of another program?")
        other = {k for k, v in self.settings.items() if saved["settings"].get(k) != v}
        if other:
            name = min(other)
            raise CheckpointError(
                f"{self.path} is of a run with {name} {saved['settings'].get(name)}, and this one has "
                f"{self.settings[name]}: go on with the same, or delete it to start anew"
            )
        try:
            for name, part in parts.items():
                part.load_state_dict(saved["parts"][name])
        except (ValueError, RuntimeError) as error:  # a module's load_state_dict raises RuntimeError
            raise CheckpointError(f"{self.path}: {error}") from error
        return saved


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file beside ``path`` that takes its name once all of it is on the disk."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # a run that was killed while it wrote
        left.unlink(missing_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with half.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)  # atomic, as the two are in one folder
    finally:
        half.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too survives a power cut
    finally:
        os.close(folder)
