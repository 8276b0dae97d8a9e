"""One process per contender: it builds, warms up, and then takes a step whenever it is asked to."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from built import Built, build
from contenders import Contender
from workloads import Shape

WARM_UP = 6
"""Steps before the first timed one, at most."""


@dataclass(frozen=True)
class Ready:
    """What a worker says when it is warm."""

    kept: int
    traffic: int
    compile_seconds: float
    """Seconds of compilation: all graphs of torch_xla, or by how much a backend's first call took longer."""
    compilations: int
    transient: int | None
    """Bytes that one step needed beside what is kept, at its peak; None where the system does not tell."""


@dataclass(frozen=True)
class Lap:
    """Seconds of one step."""

    host: float
    """Until `step()` returned, without the backend's part of it if it waits for the results (the CPU's do)."""
    total: float
    """Until the results were there."""
    kernel: float | None = None
    """The backend's part, if it waits."""


class Worker:
    """The parent's end: `step()` makes the other process take one."""

    def __init__(self, contender: Contender, shapes: Sequence[Shape], threads: int | None = None) -> None:
        # A server process imports torch and torch_xla once, and every worker is forked from it before any device is
        # opened: a process of its own for each contender, whose memory can be told apart, without its start-up time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", *(["torch_xla"] if importlib.util.find_spec("torch_xla") else [])])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, contender, shapes, threads), daemon=True)
        self._process.start()
        self.contender = contender
        self.ready: Ready = self._receive()

    def _receive(self) -> Any:
        while not self._pipe.poll(1.0):
            if not self._process.is_alive():
                raise RuntimeError(
                    f"the process of {self.contender.name!r} ended with code {self._process.exitcode}; if the system "
                    "ran out of memory, try a smaller --size or --scale, or some contenders by --only"
                )
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(f"{self.contender.name} failed:\n{answer}")
        return answer

    def step(self) -> Lap:
        self._pipe.send("step")
        lap: Lap = self._receive()
        return lap

    def close(self) -> None:
        with suppress(OSError):  # it may have ended
            self._pipe.send("close")
        self._process.join()


def serve(pipe: Connection, contender: Contender, shapes: Sequence[Shape], threads: int | None) -> None:
    """The other end."""
    try:
        use(threads, contender)
        built = build(contender, shapes)
        transient = warm_up(built)
        pipe.send(Ready(built.kept, built.traffic, *compilation(built), transient))
        while pipe.recv() == "step":
            pipe.send(lap(built))
    except Exception:
        pipe.send(traceback.format_exc())


def use(threads: int | None, contender: Contender) -> None:
    """Limits the threads of torch and of backends that use its team. XLA's pool goes by the cores that it may use."""
    if threads is None:
        return
    torch.set_num_threads(threads)
    if contender.device == "xla" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def lap(built: Built) -> Lap:
    built.prepare()
    built.kernel.seconds = 0.0
    start = perf_counter()
    built.launch()
    launched = perf_counter()
    built.finish()
    total = perf_counter() - start
    kernel = built.kernel.seconds if built.waits and built.kernel.seconds else None
    return Lap(launched - start - (kernel or 0.0), total, kernel)


def compilation(built: Built) -> tuple[float, int]:
    """Seconds of compilation in this process, and how many graphs."""
    if built.waits and built.kernel.first is not None:
        return max(0.0, built.kernel.first - lap(built).total), 1
    return compiled()


def warm_up(built: Built) -> int | None:
    """Takes steps until one compiles nothing; what that one needed of memory (see `Ready.transient`)."""
    for _ in range(WARM_UP):
        graphs = compiled()[1]
        transient = transient_bytes(lambda: lap(built))
        if compiled()[1] == graphs:
            return transient
    raise RuntimeError(f"{WARM_UP} steps, and each compiled another graph")


def compiled() -> tuple[float, int]:
    """Seconds torch_xla spent compiling in this process, and how many graphs."""
    if importlib.util.find_spec("torch_xla") is None:
        return 0.0, 0
    import torch_xla.debug.metrics as met

    data = met.metric_data("CompileTime")
    return (data[1] / 1e9, data[0]) if data else (0.0, 0)


def transient_bytes(step: Callable[[], object]) -> int | None:
    """How far the resident memory rises while `step` runs (Linux: the high-water mark of /proc, set back before)."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what malloc keeps for later would hide what the step needs
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        step()
        return max(0, _status("VmHWM") - before)
    except (OSError, KeyError):
        return None


def _status(key: str) -> int:
    lines = (line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(dict(lines)[key].split()[0]) * 1024
