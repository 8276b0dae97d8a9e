"""What a step as written costs, beside the optimizer's own step in plain fp32 and a copy of its bytes.

    python benchmarks/as_written_cost.py [--elements 4194304] [--rounds 21] [--only Lamb]

For each optimizer: the median over rounds of (time of a step on copies) / (own step in fp32 + copying as many bytes as
are converted). All three are timed in turn in each round, so that a busy machine slows all of them alike. Beside it the
ratio of the least times, which says what a step costs where nothing else runs, and how many pages more than the own
step it fetches from the system: the copies need none, and temporary tensors of `step()` more or less by chance.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from as_written import Lamb, Muon
from torch.nn import Parameter

import collage_neuron
from collage_neuron.eager.memory_estimate import bytes_by_name, bytes_of_values

MAKES: dict[str, Any] = {make.__name__: make for make in (Muon, Lamb)}


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def filled(params: list[Parameter]) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.01)


class Measured(NamedTuple):
    """What is measured of an optimizer; times in seconds."""

    ratio: float
    of_least: float
    """The ratio of the least times."""
    as_written: float
    own: float
    copying: float
    """Medians."""
    pages: int
    """That the system gave for a step as written, beside those of the own step: of 4 KiB, or of 2 MiB."""


def pages(run: Callable[[], Any]) -> int:
    """The pages that the system gives for a call; how much the C library keeps of what is freed is its own business."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measure(make: Any, elements: int, strategy: str, rounds: int) -> Measured:
    """Measures an optimizer with four parameters of `elements` elements in all."""
    shape = (1024, elements // 4096)
    of_copies, own = ([Parameter(torch.randn(shape).to(t)) for _ in range(4)] for t in (torch.bfloat16, torch.float32))
    optimizer, plain = collage_neuron.compile(make(of_copies), strategy=strategy), make(own)
    filled(of_copies)
    filled(own)
    for _ in range(3):
        optimizer.step()
        plain.step()
    kept = sum(sum(bytes_by_name(optimizer, group).values()) for group in optimizer.param_groups)
    source = torch.empty((kept + bytes_of_values(optimizer)) // 4)  # words are read and copies written; and back
    target = torch.empty_like(source)
    times = [
        (seconds(optimizer.step), seconds(plain.step), seconds(lambda: target.copy_(source))) for _ in range(rounds)
    ]
    fetched = [pages(optimizer.step) - pages(plain.step) for _ in range(3)]
    ratio = statistics.median(a / (b + c) for a, b, c in times)
    least = [min(each) for each in zip(*times, strict=True)]
    a, b, c = (statistics.median(each) for each in zip(*times, strict=True))
    return Measured(ratio, least[0] / (least[1] + least[2]), a, b, c, sorted(fetched)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", nargs="+", choices=list(MAKES), default=list(MAKES))
    given = parser.parse_args()
    logging.getLogger("collage_neuron").setLevel(logging.ERROR)
    head = (
        "optimizer",
        "strategy",
        "as written, ms",
        "own step in fp32, ms",
        "copying, ms",
        "ratio",
        "of least",
        "more pages",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for make in (MAKES[name] for name in given.only):
        for strategy in ("plus", "split433"):
            found = measure(make, given.elements, strategy, given.rounds)
            times = [f"{1e3 * x:.1f}" for x in (found.as_written, found.own, found.copying)]
            ratios = [f"{x:.2f}" for x in (found.ratio, found.of_least)]
            print(f"| {' | '.join((make.__name__, strategy, *times, *ratios, str(found.pages)))} |", flush=True)


if __name__ == "__main__":
    main()
