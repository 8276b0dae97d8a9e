"""The cache folder of generated kernels, since NKI's compiler reads the source of a kernel from a file.

The folder belongs to the user and is closed to others, and a file is used only if it has exactly the generated text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from collage_neuron.errors import UnsafeFolder

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
