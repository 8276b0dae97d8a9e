"""Processes for tests: several that gloo joins, in each of which a function runs; or one in which a script does.

Processes are forked off a server that has imported torch once and has no threads: a world starts in about a second, a
script at once. None can hang.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing as mp
import os
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import sampling
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from collage_neuron.validation import validate

TIMEOUT = 300.0
"""Seconds after which a world has failed: one of all calls of a file takes 20 on an idle core."""

PRELOAD = ["worlds", "sharded_runs", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PRELOAD += ["collage_neuron.api", "collage_neuron.passes.backends.native.backend", "llvmlite.binding"]
PRELOAD += ["torch._inductor.fx_passes.post_grad"]
"""What the server imports, once for all processes: `collage_neuron` is imported when the first of its names is read,
backends and llvmlite when they are needed, torch._dynamo when any optimizer is built, torch._inductor by torch_xla."""

Body = Callable[..., Any]
"""`body(*arguments)`, run in every process; `dist.get_rank()` tells which."""


def run_world(size: int, folder: Path, body: Body, *arguments: Any) -> list[Any]:
    """What `body` returned in each of `size` processes: tensors, numbers, texts, and containers of these.

    Raises AssertionError with the traceback of the first process that failed, or after TIMEOUT seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    context = forking()
    args = [(rank, size, folder, body, arguments) for rank in range(size)]
    processes = [context.Process(target=_enter, args=a, daemon=True) for a in args]
    for process in processes:
        process.start()
    _wait(processes, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def in_turn(calls: Mapping[Any, tuple[Any, ...]]) -> dict[Any, Any]:
    """A body for `run_world` that makes several calls, each a function and its arguments: one world for all of them."""
    found = {}
    for name, (body, *arguments) in calls.items():
        found[name] = body(*arguments)
        gc.collect()
        gc.freeze()  # of a call, code and caches are left, which `compile` would list each time in the next calls
    return found


def forking() -> mp.context.ForkServerContext:
    """What starts processes off the server, which then runs: whoever preloads something else is too late."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


def run_script(folder: Path, text: str, *arguments: object, environ: Mapping[str, str] | None = None) -> str:
    """Runs `text` as a script in a process forked off the server; returns what it prints.

    Modules that the server has imported (PRELOAD: no torch_xla) are there; nothing else is, and nothing was compiled. A
    warning is an error, as with `python -W error`. What reads a setting when torch is imported, counts threads of
    native code, or asks for another hash of strings needs a process that Python starts (`subprocess`).

    Raises AssertionError with what it has written to stderr if it fails.
    """
    process = start_script(folder, text, *arguments, environ=environ)
    process.join(2 * TIMEOUT)
    process.kill()
    process.join()
    assert process.exitcode == 0, f"exit status {process.exitcode}:\n{(folder / 'stderr.txt').read_text()}"
    return (folder / "stdout.txt").read_text()


def start_script(folder: Path, text: str, *arguments: object, environ: Mapping[str, str] | None = None) -> BaseProcess:
    """The same, of a process that runs on: what it prints is in `stdout.txt` and `stderr.txt` of the folder."""
    words = [str(folder / "script.py"), *map(str, arguments)]
    args = (folder, text, words, {**os.environ, **(environ or {})})
    process = forking().Process(target=_run, args=args)
    process.start()
    return process


def _run(folder: Path, text: str, words: list[str], environ: dict[str, str]) -> None:
    """The life of the process of a script: at its end, what is to run when Python ends does."""
    _freeze()
    os.environ.clear()
    os.environ.update(environ)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.argv = words
    warnings.resetwarnings()
    warnings.simplefilter("error")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    os._exit(_ended(lambda: exec(compile(text, words[0], "exec"), vars(main))))


def _ended(program: Callable[[], object]) -> int:
    """The exit status of Python after `program`."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _wait(processes: Sequence[BaseProcess], folder: Path) -> None:
    end = time.monotonic() + TIMEOUT
    try:
        while any(p.is_alive() for p in processes) and time.monotonic() < end:
            if any(p.exitcode for p in processes):
                break
            time.sleep(0.02)
        said = [
            f.read_text() if (f := folder / f"{rank}.txt").exists() else "nothing" for rank in range(len(processes))
        ]
        for rank, process in enumerate(processes):  # others may wait for one that has failed
            assert not process.exitcode, f"process {rank} of {len(said)} ended with {process.exitcode}:\n{said[rank]}"
        for rank, process in enumerate(processes):
            assert not process.is_alive(), f"process {rank} of {len(said)} ran for {TIMEOUT} s, here:\n{said[rank]}"
    finally:
        for process in processes:
            process.kill()
            process.join()


def _enter(rank: int, size: int, folder: Path, body: Body, arguments: tuple[Any, ...]) -> None:
    """The life of one process."""
    _freeze()
    if not sampling.WHOLE:  # as in conftest.py
        validate.is_due = lambda steps: steps <= 2
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    log = (folder / f"{rank}.txt").open("w")
    faulthandler.dump_traceback_later(TIMEOUT - 5, file=log)
    try:
        place, timeout = f"file://{folder / 'rendezvous'}", timedelta(seconds=TIMEOUT / 2)
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timeout)
        torch.save(body(*arguments), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        log.write(traceback.format_exc())
        log.flush()
        os._exit(1)  # others may wait for this process: no clean end of the group


def _freeze() -> None:
    """Freezes what a process was forked with, and tells `compile` of none, which would list half a million objects."""
    gc.freeze()
    gc.get_freeze_count = lambda: 0


class Traffic(TorchDispatchMode):
    """Notes what this process hands to collectives: bytes by operation and dtype."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(("barrier", "wait_tensor")):
            outputs_first = name.startswith("c10d::") and ("gather" in name or "scatter" in name)
            for t in tree_leaves(args[1] if outputs_first else args[0]):
                key = (name.split("::")[1].split(".")[0].strip("_"), t.dtype)
                self.sent[key] = self.sent.get(key, 0) + t.numel() * t.element_size()
        return func(*args, **(kwargs or {}))


@contextmanager
def traffic() -> Iterator[dict[tuple[str, torch.dtype], int]]:
    """Bytes handed to collectives inside the block, by (operation, dtype)."""
    with Traffic() as noted:
        yield noted.sent
