"""What a step as written on fp32 copies costs, beside the optimizer's own step in plain fp32 and a copy of its bytes.

    python benchmarks/twin_cost.py [--elements 4194304] [--rounds 9]

For each optimizer: the median over rounds of (time of a step on copies) / (own step in fp32 + copying as many bytes as
are converted). All three are timed in turn in each round, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
from as_written import Adafactor, Lamb, Muon
from torch.nn import Parameter

import collage_neuron
from collage_neuron.twins.sizes import bytes_by_name, bytes_of_copies


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def filled(params: list[Parameter]) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.01)


def measure(make: Any, elements: int, strategy: str, rounds: int) -> tuple[float, float, float]:
    """The ratio, and the medians of the step on copies and of the own step in seconds."""
    shape = (1024, elements // 4096)
    of_copies, own = ([Parameter(torch.randn(shape).to(t)) for _ in range(4)] for t in (torch.bfloat16, torch.float32))
    optimizer, plain = collage_neuron.compile(make(of_copies), strategy=strategy), make(own)
    filled(of_copies)
    filled(own)
    for _ in range(3):
        optimizer.step()
        plain.step()
    kept = sum(sum(bytes_by_name(optimizer, group).values()) for group in optimizer.param_groups)
    source = torch.empty((kept + bytes_of_copies(optimizer)) // 4)  # words are read and copies written; and back
    target = torch.empty_like(source)
    times = [
        (seconds(optimizer.step), seconds(plain.step), seconds(lambda: target.copy_(source))) for _ in range(rounds)
    ]
    ratio = statistics.median(a / (b + c) for a, b, c in times)
    return ratio, statistics.median(a for a, _, _ in times), statistics.median(b for _, b, _ in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print("| optimizer | strategy | on copies, ms | own step in fp32, ms | ratio |\n|---|---|---|---|---|")
    for make in (Muon, Lamb, Adafactor):
        for strategy in ("plus", "split433"):
            ratio, on_copies, own = measure(make, given.elements, strategy, given.rounds)
            print(f"| {make.__name__} | {strategy} | {1e3 * on_copies:.0f} | {1e3 * own:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
