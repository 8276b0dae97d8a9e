"""The folder of generated kernels: NKI's compiler looks the source of a kernel up in a real file.

The folder is the user's own and closed to others, and a file is used only if it says what was generated.
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
"""The variable that names another folder."""


def folder() -> Path:
    """The folder, made if it is not there: `$COLLAGE_NEURON_CACHE`, else `collage_neuron` in the user's cache folder.

    Raises:
        UnsafeFolder: it belongs to another user, or others may write into it.
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
    """The module `name` made of `source`, which lies in a file of the folder while it runs."""
    path = folder() / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    if not path.is_file() or path.read_text() != source:
        _write(path, source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where NKI's compiler finds the globals of a function
    exec(compile(source, str(path), "exec"), module.__dict__)  # the text that was compared, not what lies there by now
    return module


def _write(path: Path, source: str) -> None:
    """Atomically: another process that starts at the same time reads all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")  # for the owner alone
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
