"""The team: runs a compiled function on torch's own OpenMP threads.

Threads of another pool would compete with those, which spin for a while after each operation of torch: with a pool of
our own, a step took half as long again. libgomp's entry point for `#pragma omp parallel` is a plain C function.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

_FORKED = 0x40
"""PF_FORKNOEXEC in Linux's flags of a process: it was forked, and has not called exec."""


def loaded_libgomp() -> str | None:
    """The path of the libgomp that this process has loaded; of several, the one that is torch's."""
    lines = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line})
    folder = str(Path(torch.__file__).parent)
    return next((path for path in paths if path.startswith(folder)), paths[0] if paths else None)


def was_forked() -> bool:
    """Returns True if this process is a copy of another one."""
    stat = Path("/proc/self/stat").read_text()
    return bool(int(stat.rpartition(")")[2].split()[6]) & _FORKED)


class Team:
    """Runs functions on several threads."""

    def __init__(self, path: str) -> None:
        """`path` is that of a libgomp."""
        self._library = ctypes.CDLL(path)
        self._parallel = self._library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        self._process = 0 if was_forked() else os.getpid()
        self._is_watched = False

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """Addresses of the functions by which a thread learns its number, and how many there are."""
        names = {"collage_thread": "omp_get_thread_num", "collage_threads": "omp_get_num_threads"}
        return {ours: _address(self._library, theirs) for ours, theirs in names.items()}

    def threads(self) -> int:
        """How many threads to use: torch's number, and one in a forked process.

        A fork copies no threads, but libgomp's list of them: to wait for them would take forever.
        """
        return torch.get_num_threads() if os.getpid() == self._process else 1

    def run(self, function: int, context: int, threads: int) -> None:
        """Runs `function(context)` on that many threads, or fewer; returns when all have finished."""
        if not self._is_watched:
            # From now on torch's operations would wait forever in a fork too, those of validation among them.
            os.register_at_fork(after_in_child=_alone)
            self._is_watched = True
        self._parallel(function, context, threads, 0)


def _alone() -> None:
    """Makes torch use one thread, as it does itself in the processes of a data loader."""
    torch.set_num_threads(1)


def _address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    return address
