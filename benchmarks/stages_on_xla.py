"""What a step with sums (LAMB) costs on torch_xla's CPU device: compiled, and in plain fp32.

    python benchmarks/stages_on_xla.py [--elements 4194304] [--rounds 9] [--strategy full]

All take a step in turn in each round, so that a busy machine slows all of them alike: medians of the ratios to the
optimizer's own step in plain fp32, and medians of the times. AdamW has no sums: its compiled step says what the rest of
the work costs. There is nothing else to compare with: steps as written run on the CPU only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import torch
import torch_xla
from staged import Lamb
from torch.nn import Linear

import collage_neuron

COLUMNS = 1024


def model(elements: int, dtype: torch.dtype) -> Linear:
    torch.manual_seed(0)
    return Linear(COLUMNS, elements // COLUMNS, bias=False).to(dtype)


def plain(elements: int, strategy: str) -> Any:
    return Lamb(model(elements, torch.float32).to(torch_xla.device()).parameters())


def compiled(make: Callable[[Any], Any], elements: int, strategy: str) -> Any:
    warnings.simplefilter("error", collage_neuron.RunsAsWritten)
    own = make(model(elements, torch.bfloat16).to(torch_xla.device()).parameters())
    return collage_neuron.compile(own, strategy=strategy, verbose=False)


def step(optimizer: Any) -> float:
    """The seconds of a step, gradients ready before."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full(p.shape, 0.01, dtype=p.dtype).to(p.device)
    torch_xla.sync(wait=True)
    start = time.perf_counter()
    optimizer.step()
    torch_xla.sync(wait=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--strategy", default="full")
    chosen = parser.parse_args()
    given = chosen.elements, chosen.strategy
    contenders = {
        "LAMB, plain fp32": plain(*given),
        "LAMB, compiled": compiled(Lamb, *given),
        "AdamW, compiled": compiled(torch.optim.AdamW, *given),
    }
    for optimizer in contenders.values():
        for _ in range(3):
            step(optimizer)
    times = [{name: step(optimizer) for name, optimizer in contenders.items()} for _ in range(chosen.rounds)]
    for name in contenders:
        ratio = statistics.median(each[name] / each["LAMB, plain fp32"] for each in times)
        print(f"{name:22} {statistics.median(each[name] for each in times) * 1e3:8.1f} ms  {ratio:6.2f} x plain fp32")


if __name__ == "__main__":
    main()
