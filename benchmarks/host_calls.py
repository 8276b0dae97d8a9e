"""Times the calls that any step over many tensors needs on the host: each number that guards or counts, read once.

Our step reads them in C loops of Python (`map`), once each, but addresses and versions twice. Beside them a step of
torch's fused fp32 AdamW over the same shapes. Everything after a pass over 64 MB, as in training, where the caches hold
something else; medians, one thread::

    python benchmarks/host_calls.py --json benchmarks/results/host_calls.json     # ten seconds
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from report import machine, save, settings_of
from torch import Tensor
from workloads import gpt2_small

WORDS = ("param_lo", "exp_avg", "exp_avg_sq", "exp_avg_sq_lo")
"""Of the states of AdamW under `plus`, beside `step`."""


def calls() -> dict[str, Callable[[], object]]:
    """What is read or written once, for the shapes of GPT-2 small x 0.25."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in gpt2_small(0.25).shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    states = [{"step": torch.tensor(1.0)} | {k: torch.zeros_like(p) for k in WORDS} for p in params]
    words = list(chain.from_iterable([s[k] for k in WORDS] for s in states))
    grads, versions = attrgetter("grad"), attrgetter("_version")
    kinds = attrgetter("dtype"), attrgetter("shape")

    def written() -> list[Any]:
        return [list(map(versions, params)), list(map(versions, words))]

    return {
        "gradients": lambda: list(map(grads, params)),
        "names and types of states": lambda: [(tuple(s), tuple(map(type, s.values()))) for s in states],
        "types and shapes": lambda: [list(map(get, params)) for get in kinds],
        "addresses": lambda: [list(map(Tensor.data_ptr, x)) for x in (params, map(grads, params), words)],
        "versions before the step": written,
        "versions after it": written,
        "step counts, read": lambda: torch.stack([s["step"] for s in states]).tolist(),
        "step counts, written": lambda: torch._foreach_add_([s["step"] for s in states], 1.0),
    }


def fused() -> Callable[[], object]:
    """A step of torch's fused fp32 AdamW."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in gpt2_small(0.25).shapes]
    for p in params:
        p.grad = torch.zeros_like(p)
    return torch.optim.AdamW(params, fused=True).step


def times(run: Callable[[], object], rounds: int, other: Tensor) -> Iterator[float]:
    """Milliseconds, each after a pass over `other`."""
    for _ in range(rounds):
        other.add_(1)
        start = perf_counter()
        run()
        yield (perf_counter() - start) * 1e3


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    other = torch.zeros(1 << 24)
    found = {name: median(times(run, given.rounds, other)) for name, run in calls().items()}
    content = {"calls": found, "fused": median(times(fused(), given.rounds, other))}
    for name, ms in {**found, "together": sum(found.values()), "torch's fused step": content["fused"]}.items():
        print(f"{name:28} {ms:6.2f} ms")
    if given.json:
        save(given.json, {"machine": machine(), "settings": settings_of(given) | {"processes": "1"}} | content)


if __name__ == "__main__":
    main()
