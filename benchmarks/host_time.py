"""Times what one optimizer step costs on the host: AdamW over the 148 tensors of GPT-2 small, shrunk to almost nothing.

With tensors this small a step is all bookkeeping, on the CPU with the reference backend. Checkouts are compared
interleaved, each in processes of its own, and the ratio is taken within a round, since a machine is not the same from
one minute to the next::

    python benchmarks/host_time.py
    python benchmarks/host_time.py --against ../older-checkout --rounds 9
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import process_time

import torch
from workloads import gpt2_small

HERE = Path(__file__).resolve()
WARM_UP, STEPS = 34, 29
"""Between steps 34 and 63 no step is validated: those are 1, 2, 4, 8, ... ."""


def step_times(strategy: str) -> list[float]:
    """Seconds of processor time of each measured step: others on the machine count less than in the time of a clock."""
    import collage_neuron  # that of the checkout in PYTHONPATH

    torch.set_num_threads(1)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in gpt2_small(1 / 192).shapes]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-3), strategy=strategy)
    for p in params:
        p.grad = torch.randn_like(p)
    times = []
    for _ in range(WARM_UP + STEPS):
        start = process_time()
        optimizer.step()
        times.append(process_time() - start)
    return times[WARM_UP:]


def measured(checkout: Path, strategy: str) -> float:
    """The median step of a new process with the package of `checkout`, in milliseconds."""
    command = [sys.executable, str(HERE), "--once", "--strategy", strategy]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, check=True)
    return float(done.stdout)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each checkout (default 5)")
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the median step, and that of another checkout with the ratio of the two."""
    given = options(argv)
    if given.once:
        print(1e3 * median(step_times(given.strategy)))
        return
    checkouts = [HERE.parents[1], *([given.against.resolve()] if given.against else [])]
    rounds = [[measured(checkout, given.strategy) for checkout in checkouts] for _ in range(given.rounds)]
    for i, checkout in enumerate(checkouts):
        print(f"{median(times[i] for times in rounds):8.2f} ms a step  {checkout.name}")
    if given.against:
        print(f"{median(ours / theirs for ours, theirs in rounds):8.2f} is the median ratio of {given.rounds} rounds")


if __name__ == "__main__":
    main()
