"""What measuring costs: a step with `monitor(every=1)` against the same step without, alone and in training.

Two equal optimizers take turns, one of them monitored; ratios are taken within a round. `step` is `optimizer.step()` on
gradients that are there, `training` a small GPT's forward, backward and step. On XLA the time is until the device is
done, and nothing is read: that is what a step with a monitor costs, not what reading costs (`read`)::

    python benchmarks/monitor_cost.py
    python benchmarks/monitor_cost.py --strategies plus --rounds 41
    python benchmarks/monitor_cost.py --backends native --strategies plus --threads 1 2
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

if importlib.util.find_spec("libneuronxla") is None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import torch
from built import parameters
from contenders import backends, opened
from gpt import GPT, Shape
from report import Spread, machine, save, settings_of
from torch import Tensor
from torch.nn import functional as F
from workloads import Workload, gpt2_small, one_tensor

import collage_neuron


class Twin(NamedTuple):
    """One of the two: what it does in a round, and how its monitor is read."""

    round: Callable[[], None]
    read: Callable[[], object]


def stepping(workload: Workload, strategy: str, backend: str, monitored: bool) -> Twin:
    device, finish = opened(backend)
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(parameters(workload.shapes, device), lr=1e-4, weight_decay=0.1)
    collage_neuron.compile(optimizer, strategy=strategy, backend=backend)

    def step() -> None:
        optimizer.step()
        finish()

    return Twin(step, watch(optimizer, monitored))


def training(strategy: str, backend: str, monitored: bool) -> Twin:
    device, finish = opened(backend)
    torch.manual_seed(0)
    shape = Shape()
    model: torch.nn.Module = GPT(shape).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, backend=backend)
    batch = torch.randint(0, 256, (shape.batch, shape.block + 1)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        logits: Tensor = model(batch[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        finish()

    return Twin(step, watch(optimizer, monitored))


def watch(optimizer: torch.optim.Optimizer, monitored: bool) -> Callable[[], object]:
    return collage_neuron.monitor(optimizer).latest if monitored else lambda: None


def seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


class Cost(NamedTuple):
    """Milliseconds of either, their ratio, round by round, and milliseconds of reading what was measured."""

    plain: float
    measured: float
    ratio: Spread
    read: float

    def __str__(self) -> str:
        return f"{self.plain:>10.2f}{self.measured:>12.2f}{self.ratio!s:>20}{self.read:>10.2f}"


def compare(make: Callable[[bool], Twin], rounds: int) -> Cost:
    """The two twins go first in turn."""
    twins = [make(False), make(True)]
    for twin in twins:
        for _ in range(3):
            twin.round()
    times: list[list[float]] = [[], []]
    reads = []
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            times[which].append(seconds(twins[which].round))
        reads.append(seconds(twins[1].read))
    ratio = Spread.of([b / a for a, b in zip(*times, strict=True)])
    plain, measured = (1e3 * median(t) for t in times)
    return Cost(plain, measured, ratio, 1e3 * median(reads))


def contests(strategy: str, backend: str, workloads: Sequence[Workload]) -> Mapping[str, Callable[[bool], Twin]]:
    """What is compared, by name: how a twin is made, monitored or not."""
    kind = f"{backend}, {strategy}"
    steps = {f"{kind}, step: {w.name}": functools.partial(stepping, w, strategy, backend) for w in workloads}
    return steps | {f"{kind}, training: byte-level GPT": functools.partial(training, strategy, backend)}


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies", nargs="+", choices=collage_neuron.STRATEGIES, default=["bf16", "light", "plus", "fp32"]
    )
    parser.add_argument("--backends", nargs="+", choices=backends(), default=backends())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--size", type=int, default=1 << 24, help="elements of the one tensor (default 2**24)")
    parser.add_argument("--threads", type=int, nargs="+", help="of torch and native code (default: as torch has it)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    for backend in given.backends:
        opened(backend)  # torch_xla aborts if its device is opened after a first backward pass
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    print(f"\n{'what':<56}{'ms':>10}{'monitored':>12}{'ratio (quartiles)':>20}{'read ms':>10}")
    workloads = (one_tensor(given.size), gpt2_small(0.25))
    rows: list[dict[str, Any]] = []
    threads = given.threads or [torch.get_num_threads()]
    for backend, strategy, many in itertools.product(given.backends, given.strategies, threads):
        torch.set_num_threads(many)
        for name, make in contests(strategy, backend, workloads).items():
            cost = compare(make, given.rounds)
            what = f"{name}, {many} thread{'s' if many > 1 else ''}"
            print(f"{what:<56}{cost}", flush=True)
            rows.append({"what": what, **cost._asdict(), "ratio": asdict(cost.ratio)})
    if given.json:
        settings = {**settings_of(given), "processes": 1}
        save(given.json, {"machine": machine(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
