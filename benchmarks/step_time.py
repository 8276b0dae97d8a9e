"""Times one optimizer step: every strategy, arithmetic and backend against torch's AdamW and a memory copy.

Each contender lives in a process of its own; in each round every one of them takes one step, alone, and times are
compared within the round. What the columns mean is printed below the table; benchmarks/README.md has a run::

    python benchmarks/step_time.py
    python benchmarks/step_time.py --only plus --workload one --rounds 21
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from contenders import BASELINES, Contender, contenders
from report import LEGEND, Row, content, machine, rows, save, settings_of, table
from worker import Lap, Ready, Worker
from workloads import Workload, gpt2_small, one_tensor

T = TypeVar("T")
AT_ONCE = 8
"""Contenders whose processes are there at the same time, beside those that all are compared with: memory is finite."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=["one", "gpt2", "both"], default="both")
    parser.add_argument("--size", type=int, default=1 << 24, help="elements of the one tensor (default 2**24)")
    parser.add_argument("--scale", type=Fraction, default=Fraction(1, 4), help="of GPT-2 small's width (default 1/4)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--patience",
        type=float,
        default=2.0,
        help="seconds after which a contender sits out further rounds (default 2)",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="of torch's own and of native, one after another (default 1)"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[cores()], help="(default: one for each core)")
    parser.add_argument("--peers", action="store_true", help="also optimizers of other packages: make bench")
    parser.add_argument("--only", type=re.compile, help="regular expression: contenders with such a name")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args(argv)
    for name in ("rounds", "processes"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} is {getattr(given, name)}: give 1 or more")
    if min(given.threads) < 1:
        parser.error(f"--threads has {min(given.threads)}: give 1 or more")
    known = contenders(given.peers)
    if given.only and not any(given.only.search(c.name) for c in known):
        parser.error(f"no contender's name matches {given.only.pattern!r}: {'; '.join(c.name for c in known)}")
    return given


def progress(items: Sequence[T], title: str) -> Iterable[T]:
    if importlib.util.find_spec("tqdm") is None:
        print(title, file=sys.stderr, flush=True)
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, leave=False, disable=None)
    return bar


def chosen(only: re.Pattern[str] | None, peers: bool) -> list[Contender]:
    """The contenders whose names match, and the two that all are compared with."""
    return [c for c in contenders(peers) if only is None or only.search(c.name) or c in BASELINES]


def measure(workload: Workload, who: Sequence[Contender], given: argparse.Namespace, threads: int) -> list[Row]:
    """Rows of all contenders; a few at a time are measured together with the two that all are compared with."""
    others = sorted((c for c in who if c not in BASELINES), key=lambda c: not c.is_fast)
    groups = [others[i : i + AT_ONCE] for i in range(0, len(others), AT_ONCE)] or [[]]
    found: dict[str, Row] = {}
    for group in progress(groups, "groups"):
        laps: dict[Contender, list[list[Lap]]] = {c: [] for c in (*BASELINES, *group)}
        ready: dict[Contender, Ready] = {}
        for _ in range(given.processes if all(c.is_fast for c in group) else 1):
            together(workload, laps, ready, given, threads)
        found = {row.name: row for row in rows(workload, laps, ready)} | found
    return [found[c.name] for c in who]


def together(
    workload: Workload, laps: dict[Contender, list[list[Lap]]], ready: dict[Contender, Ready],
    given: argparse.Namespace, threads: int,
) -> None:  # fmt: skip
    """A process for each contender. All take one step at least; the two that all are compared with take every round."""
    with ExitStack() as stack:
        workers = []
        for contender in laps:
            workers.append(Worker(contender, workload.shapes, threads))
            stack.callback(workers[-1].close)
            ready[contender] = workers[-1].ready
            laps[contender].append([])
        for _ in range(given.rounds):
            for worker in workers:
                own = laps[worker.contender][-1]
                if worker.contender in BASELINES or sum(lap.total for lap in own) < given.patience:
                    own.append(worker.step())


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    workloads: dict[str, Workload] = {"one": one_tensor(given.size), "gpt2": gpt2_small(float(given.scale))}
    selected = list(workloads.values()) if given.workload == "both" else [workloads[given.workload]]
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    results: dict[tuple[Workload, int], list[Row]] = {}
    for workload, threads in product(selected, given.threads):
        start = perf_counter()
        results[workload, threads] = measure(workload, chosen(given.only, given.peers), given, threads)
        print(f"\n{workload}; {threads} thread(s); {perf_counter() - start:.0f} s")
        print(f"\n{table(results[workload, threads])}", flush=True)
        if given.json:
            save(given.json, content(settings_of(given), results))
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
