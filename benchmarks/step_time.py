"""Times one optimizer step: every strategy, arithmetic and backend against torch's AdamW and a memory copy.

Each contender lives in a process of its own; in each round every one of them takes one step, alone, and times are
compared within the round. What the columns mean is printed below the table; benchmarks/README.md has a run::

    python benchmarks/step_time.py
    python benchmarks/step_time.py --only plus --workload one --rounds 21
    python benchmarks/step_time.py --profile plus           # what bounds the step on XLA
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
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

# torch_xla picks its device when it is first imported, and asks for this line where there is no accelerator.
if importlib.util.find_spec("libneuronxla") is None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")

from contenders import COPY, FUSED, Contender, contenders
from hlo_profile import profile
from report import LEGEND, Row, machine, rows, save, table
from worker import Lap, Worker
from workloads import Workload, gpt2_small, one_tensor

from collage_neuron import STRATEGIES

T = TypeVar("T")
BASELINES = (COPY, FUSED["fp32"])


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
    parser.add_argument("--only", type=re.compile, help="regular expression: contenders with such a name")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    profile_help = "say what bounds this strategy's step on XLA, and end"
    parser.add_argument("--profile", choices=STRATEGIES, metavar="STRATEGY", help=profile_help)
    parser.add_argument("--arithmetic", choices=["fp32", "bf16"], default="fp32", help="of --profile")
    given = parser.parse_args(argv)
    if given.profile and importlib.util.find_spec("torch_xla") is None:
        parser.error('--profile looks at what XLA compiles, and torch_xla is not installed: pip install ".[xla]"')
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}: give 1 or more")
    if given.only and not any(given.only.search(c.name) for c in contenders()):
        parser.error(f"no contender's name matches {given.only.pattern!r}: {'; '.join(c.name for c in contenders())}")
    return given


def progress(items: Sequence[T], title: str) -> Iterable[T]:
    if importlib.util.find_spec("tqdm") is None:
        print(title, file=sys.stderr, flush=True)
        return items
    from tqdm import tqdm

    bar: Iterable[T] = tqdm(items, title, leave=False, disable=None)
    return bar


def chosen(only: re.Pattern[str] | None) -> list[Contender]:
    """The contenders whose names match, and the two that all are compared with."""
    return [c for c in contenders() if only is None or only.search(c.name) or c in BASELINES]


def measure(workload: Workload, who: Sequence[Contender], rounds: int, patience: float) -> list[Row]:
    """Everyone takes one step at least; the two that all are compared with take every round."""
    with ExitStack() as stack:
        workers = []
        for contender in progress(who, "building"):
            workers.append(Worker(contender, workload.shapes))
            stack.callback(workers[-1].close)
        laps: dict[Contender, list[Lap]] = {c: [] for c in who}
        for _ in progress(range(rounds), "rounds"):
            for worker in workers:
                own = laps[worker.contender]
                if worker.contender in BASELINES or sum(lap.total for lap in own) < patience:
                    own.append(worker.step())
        return rows(workload, laps, {w.contender: w.ready for w in workers})


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    workloads: dict[str, Workload] = {"one": one_tensor(given.size), "gpt2": gpt2_small(float(given.scale))}
    selected = list(workloads.values()) if given.workload == "both" else [workloads[given.workload]]
    if given.profile:
        for workload in selected:
            print(f"\n{workload}\n\n{profile(given.profile, given.arithmetic, workload)}")
        return
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    results: dict[Workload, list[Row]] = {}
    for workload in selected:
        start = perf_counter()
        results[workload] = measure(workload, chosen(given.only), given.rounds, given.patience)
        print(f"\n{workload}; {perf_counter() - start:.0f} s\n\n{table(results[workload])}", flush=True)
        if given.json:
            settings: dict[str, Any] = {k: str(v) for k, v in vars(given).items()}
            save(given.json, settings, results)
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
