"""Times updates with reductions beside an elementwise one: AdamW, on native code under the same strategy.

An update with reductions makes several passes over memory: each reduction stage reads its inputs, and the last stage
reads and writes. `bytes` are those of all passes, and `ratio` is the time in which the backend runs a step, over the
time that as many bytes take at the rate of AdamW (`Native.run` of both, in turn in one process; the median of the
ratios within a round). `kernels` is the same for machine code alone, and `whole` for `optimizer.step()`: code that is
not torch's own runs in each step, while its values wait (`host ms`, which hardly depends on the elements). `in
cache` is what arithmetic alone takes: machine code's least time on one matrix of 512 x 512, by element, over the same::

    python benchmarks/stage_cost.py                                  # two minutes
    python benchmarks/stage_cost.py --json benchmarks/results/stage_cost.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from built import parameters
from report import Spread, machine, save, settings_of
from rowed import Came
from staged import Lamb, Lars, Novograd, StableAdamW
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.native.backend import Engine, Native
from collage_neuron.passes.backends.native.jobs import Step
from collage_neuron.passes.backends.protocol import Launch, Measure

HERE = Path(__file__).resolve()
Make = Callable[[list[Parameter]], Optimizer]
Shapes = list[tuple[int, ...]]

STAGED: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "LAMB": Lamb,
    "StableAdamW": StableAdamW,
    "NovoGrad": Novograd,
    "LARS": Lars,
    "CAME": Came,
}
"""The first is the elementwise one."""

WARM_UP = 3

CACHED = 512
"""Rows and columns of a matrix that fits the cache with all its states."""


class TimedEngine(Engine):
    """Machine code, with the time in it."""

    seconds = 0.0

    def run(self, step: Step) -> torch.Tensor:
        start = perf_counter()
        found = super().run(step)
        self.seconds += perf_counter() - start
        return found


class Watched(Native):
    """Native code, with the time of the last step and the bytes that its passes move."""

    name = "watched"

    def __init__(self) -> None:
        super().__init__()
        self._engine = TimedEngine()
        self.seconds, self.kernels, self.bytes = 0.0, 0.0, 0

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        assert isinstance(self._engine, TimedEngine)
        self._engine.seconds = 0.0
        start = perf_counter()
        found = super().run(launches)
        self.seconds, self.kernels = perf_counter() - start, self._engine.seconds
        self.bytes = sum(map(bytes_of, launches))
        return found


def bytes_of(launch: Launch) -> int:
    """The bytes that the passes of a launch read and write, of tensors of the parameters' shapes."""
    update, moved = launch.update, 0
    *before, _ = update.parts
    for reads, writes in zip(launch.reads, launch.writes, strict=True):
        sizes = {key: t.nbytes for key, t in zip(update.inputs, reads, strict=True)}
        moved += sum(sizes[key] for part in before for key in part.inputs)
        moved += sum(sizes[key] for key in update.parts[-1].inputs) + sum(t.nbytes for t in writes)
    return moved


def stepped(make: Make, shapes: Shapes, **settings: Any) -> Optimizer:
    """A compiled optimizer after a few steps."""
    torch.manual_seed(0)
    optimizer = make(parameters(shapes))
    collage_neuron.compile(optimizer, verbose=False, validate="off", **settings)
    for _ in range(WARM_UP):
        optimizer.step()
    return optimizer


def timed(optimizer: Optimizer) -> float:
    start = perf_counter()
    optimizer.step()
    return perf_counter() - start


Lap = tuple[float, float, float, int]
"""Of a step: seconds of all of it, of the backend, of machine code; and bytes."""


def stages_once(strategy: str, rounds: int, shapes: Shapes) -> dict[str, list[Lap]]:
    """The steps of all optimizers in turn."""
    backend = Watched()
    registry.register(backend)
    optimizers = {name: stepped(make, shapes, strategy=strategy, backend="watched") for name, make in STAGED.items()}
    found: dict[str, list[Lap]] = {name: [] for name in optimizers}
    for _ in range(rounds):
        for name, optimizer in optimizers.items():
            whole = timed(optimizer)
            found[name].append((whole, backend.seconds, backend.kernels, backend.bytes))
    registry.unregister("watched")
    return found


def stage_rows(runs: list[dict[str, Any]], threads: int, elements: int) -> list[dict[str, Any]]:
    """The rows of the table, of several processes."""
    rows = []
    for name in STAGED:
        own, base = ([lap for run in runs for lap in run["laps"][n]] for n in (name, next(iter(STAGED))))
        rate = median(x[1] / x[3] for x in base)
        cached = min(run["cached"][name] for run in runs)
        ratios = [
            [x[i] / x[3] / (y[i] / y[3]) for x, y in zip(own, base, strict=True)] for i in range(3)
        ]  # within a round
        rows.append(
            {
                "optimizer": name,
                "threads": threads,
                "ms": 1e3 * median(x[1] for x in own),
                "host": 1e3 * median(x[0] - x[1] for x in own),
                "bytes": own[0][3],
                "cached": cached * elements / (own[0][3] * rate),
            }
            | {k: vars(Spread.of(r)) for k, r in zip(("whole", "ratio", "kernels"), ratios, strict=True)}
        )
    return rows


def once(given: argparse.Namespace) -> Any:
    """What a process measures."""
    logging.getLogger("collage_neuron").setLevel(logging.ERROR)
    torch.set_num_threads(given.threads[0])
    side = round((given.elements / given.tensors) ** 0.5)
    laps = stages_once(given.strategy, given.rounds, [(side, side)] * given.tensors)
    cached = stages_once(given.strategy, 5 * given.rounds, [(CACHED, CACHED)])
    return {"laps": laps, "cached": {name: min(lap[2] for lap in own) / CACHED**2 for name, own in cached.items()}}


def processes(given: argparse.Namespace, threads: int) -> list[Any]:
    """What several processes have measured, one after another."""
    command = [sys.executable, str(HERE), "--once", "--strategy", given.strategy, "--rounds", str(given.rounds)]
    command += ["--elements", str(given.elements), "--tensors", str(given.tensors), "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    found = []
    for _ in range(given.processes):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout))
    return found


def spread(of: dict[str, float]) -> str:
    return str(Spread(**of))


def printed_stages(rows: list[dict[str, Any]], elements: int) -> None:
    for r in rows:
        print(
            f"{r['optimizer']:<12}{r['threads']:>3}{r['ms']:>9.1f}{r['bytes'] / elements:>7.1f}  "
            f"{spread(r['ratio']):<18}{spread(r['kernels']):<18}{spread(r['whole']):<18}{r['host']:>7.1f}{r['cached']:>10.2f}",
            flush=True,
        )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--elements", type=int, default=1 << 24)
    parser.add_argument("--tensors", type=int, default=4, help="square matrices of so many elements in all (default 4)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    if given.once:
        print(json.dumps(once(given)))
        return
    stages: list[dict[str, Any]] = []
    print("optimizer  threads    ms  bytes  ratio             kernels           whole             host ms  in cache")
    for threads in given.threads:
        stages += (found := stage_rows(processes(given, threads), threads, given.elements))
        printed_stages(found, given.elements)
    if given.json:
        save(given.json, {"machine": machine(), "settings": settings_of(given), "stages": stages})


if __name__ == "__main__":
    main()
