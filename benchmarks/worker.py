"""One process per contender: it builds, warms up, and then takes a step whenever it is asked to."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from contenders import Built, Contender, build
from workloads import Shape

WARM_UP = 6
"""Steps before the first timed one, at most."""


@dataclass(frozen=True)
class Ready:
    """What a worker says when it is warm."""

    kept: int
    traffic: int
    compile_seconds: float
    compilations: int
    transient: int | None
    """Bytes that one step needed beside what is kept, at its peak; None where the system does not tell."""


@dataclass(frozen=True)
class Lap:
    """Seconds of one step: until `step()` returned (on XLA: traced), and until its results were there."""

    host: float
    total: float


class Worker:
    """The parent's end: `step()` makes the other process take one."""

    def __init__(self, contender: Contender, shapes: Sequence[Shape]) -> None:
        # A server process imports torch and torch_xla once, and every worker is forked from it before any device is
        # opened: a process of its own for each contender, whose memory can be told apart, without its start-up time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", *(["torch_xla"] if importlib.util.find_spec("torch_xla") else [])])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, contender, shapes), daemon=True)
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


def serve(pipe: Connection, contender: Contender, shapes: Sequence[Shape]) -> None:
    """The other end."""
    try:
        built = build(contender, shapes)
        transient = warm_up(built)
        pipe.send(Ready(built.kept, built.traffic, *compiled(), transient))
        while pipe.recv() == "step":
            pipe.send(lap(built))
    except Exception:
        pipe.send(traceback.format_exc())


def lap(built: Built) -> Lap:
    start = perf_counter()
    built.launch()
    launched = perf_counter()
    built.finish()
    return Lap(launched - start, perf_counter() - start)


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
