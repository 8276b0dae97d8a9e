"""What validation costs: the time it takes in the steps that are validated, against a thousand steps.

AdamW on GPT-2 small's shapes. The first validation also compiles, on XLA, the one small graph that all later ones run;
the others, of steps 2, 4, 8, ..., 512, are taken to cost what those measured cost (the median)::

    python benchmarks/validation_cost.py
    python benchmarks/validation_cost.py --backends xla --scale 0.25 --steps 16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from built import parameters
from contenders import backends, opened
from workloads import gpt2_small

import collage_neuron
from collage_neuron.validation import validate

THOUSAND = 1000


def timed(check: Any, into: list[float]) -> Any:
    """`check`, which notes how long it takes."""

    def run(*arguments: Any) -> None:
        start = perf_counter()
        check(*arguments)
        into.append(perf_counter() - start)

    return run


def measure(backend: str, strategy: str, scale: float, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step without its validation, and seconds of the validation in each."""
    device, finish = opened(backend)
    torch.manual_seed(0)
    params = parameters(gpt2_small(scale).shapes, device)
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-4), strategy=strategy, backend=backend)
    finish()
    checks: list[float] = []
    whole: list[float] = []
    check, validate.check = validate.check, timed(validate.check, checks)
    for _ in range(steps):
        start = perf_counter()
        optimizer.step()
        finish()
        whole.append(perf_counter() - start)
    validate.check = check
    return [a - b for a, b in zip(whole, checks, strict=True)], checks


def report(plain: Sequence[float], checks: Sequence[float]) -> str:
    """The first validation, a later one, a step without, and the share of a thousand steps."""
    due = [i for i in range(1, THOUSAND + 1) if validate.is_due(i)]
    later = median(t for i, t in enumerate(checks, 1) if i > 1 and validate.is_due(i))
    rest = median(t for i, t in enumerate(checks, 1) if not validate.is_due(i))
    step = median(plain[1:])  # the first one compiles
    cost = checks[0] + (len(due) - 1) * later + (THOUSAND - len(due)) * rest
    return f"{1e3 * checks[0]:>12.1f}{1e3 * later:>12.1f}{1e3 * step:>12.1f}{100 * cost / (THOUSAND * step):>12.3f} %"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=backends(), default=backends())
    parser.add_argument("--strategies", nargs="+", choices=collage_neuron.STRATEGIES, default=["plus"])
    parser.add_argument("--scale", type=float, default=1.0, help="of the width and the rows of GPT-2 small")
    parser.add_argument("--steps", type=int, default=5, help="at least 3")
    chosen = parser.parse_args(argv)
    print(gpt2_small(chosen.scale))
    print(f"{'':<24}{'first, ms':>12}{'later, ms':>12}{'step, ms':>12}{'of 1000':>12}")
    for backend in chosen.backends:
        for strategy in chosen.strategies:
            found = measure(backend, strategy, chosen.scale, max(3, chosen.steps))
            print(f"{f'{backend}, {strategy}':<24}{report(*found)}", flush=True)


if __name__ == "__main__":
    main()
