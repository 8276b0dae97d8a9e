"""Steps on a CUDA device: whether their bits are the CPU's, and how long one takes beside torch's own AdamW.

    python benchmarks/on_cuda.py

Nothing in the project needs such a device. `docs/faq.md` has what this printed on one.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from foreign import Lamb, Lion, ScheduleFreeAdamW, Sophia

import collage_neuron

OPTIMIZERS: list[Any] = [
    torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, Lamb, Lion,
    ScheduleFreeAdamW, Sophia,
]  # fmt: skip
STRATEGIES = ("split433", "plus", "fp32", "bf16", "split422", "stochastic")
SHAPES = ((64, 48), (33, 7), (128,))
STEPS = 5


def normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """The same bf16 numbers on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def words(make: Any, strategy: str, device: str) -> list[torch.Tensor]:
    """All that an optimizer keeps after a few steps, parameters included."""
    params = [Parameter(normal(shape, i).to(device)) for i, shape in enumerate(SHAPES)]
    settings: Any = {"strategy": strategy, "backend": "reference", "verbose": False}
    optimizer = collage_neuron.compile(make(params, lr=1e-2), **settings)
    for step in range(STEPS):
        for i, p in enumerate(params):
            p.grad = normal(p.shape, 100 + 10 * step + i).to(device)
        optimizer.step()
    states = [x for p in params for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)]
    return [x.detach().cpu() for x in (*params, *states)]


def milliseconds(optimizer: Any, rounds: int = 12) -> float:
    """The median of steps, without the first ones."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        optimizer.step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[3:])


def large(dtype: torch.dtype) -> list[Parameter]:
    """Parameters of 100 million elements together, with gradients."""
    params = [Parameter(torch.randn(2048, 2048, device="cuda").mul_(0.02).to(dtype)) for _ in range(24)]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def main() -> None:
    """Prints both tables."""
    logging.getLogger("collage_neuron").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}: bits after {STEPS} steps")
    for make in OPTIMIZERS:
        same = [all(map(torch.equal, words(make, s, "cpu"), words(make, s, "cuda"))) for s in STRATEGIES]
        print(
            f"{make.__name__:18}", *(f"{s} {'same' if x else 'differ'}" for s, x in zip(STRATEGIES, same, strict=True))
        )
    print("AdamW of 100 million parameters, ms a step")
    for dtype in (torch.float32, torch.bfloat16):
        print(f"torch, fused, {dtype}  {milliseconds(torch.optim.AdamW(large(dtype), fused=True)):.2f}")
    for strategy in ("split433", "plus"):
        optimizer = collage_neuron.compile(torch.optim.AdamW(large(torch.bfloat16)), strategy=strategy, validate="off")
        print(f"{strategy:12}  {milliseconds(optimizer):.2f}")


if __name__ == "__main__":
    main()
