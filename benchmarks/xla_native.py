"""Times a whole training step on torch_xla's CPU device: the update as HLO, and as native code on memory lent to XLA.

A step is forward, backward, update and all syncs, of `examples/gpt.py`'s model. Each contender takes one step a round;
the ratios are medians over rounds, of times and of CPU seconds of all threads, which other processes disturb less::

    python benchmarks/xla_native.py
    python benchmarks/xla_native.py --strategy light --rounds 21 --processes 5
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, Shape
from torch.nn import functional as F

import collage_neuron

SHAPES = {
    "default": Shape(),
    "wide": Shape(width=256, layers=4, batch=2),
    "deep": Shape(width=128, layers=6, batch=2, block=32),
}
BACKENDS = "xla", "xla_native"


def stepper(
    backend: str | None, shape: Shape, strategy: str, device: torch.device
) -> Callable[[], tuple[float, float]]:
    """A function that takes a training step and returns its seconds and CPU seconds; without a backend no update."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(shape).to(device)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = collage_neuron.compile(
        model, optimizer, strategy=strategy, backend=backend or "auto", validate="off"
    )
    import torch_xla

    def step() -> tuple[float, float]:
        text = torch.randint(0, 256, (shape.batch, shape.block + 1)).to(device)
        torch_xla.sync(wait=True)
        start, used = perf_counter(), process_time()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        if backend is not None:
            optimizer.step()
        torch_xla.sync()
        loss.item()
        return perf_counter() - start, process_time() - used

    return step


def measure(name: str, strategy: str, rounds: int) -> str:
    """One line for a shape: milliseconds of a step without an update and with each backend's, and their ratio."""
    import torch_xla

    shape, device = SHAPES[name], torch_xla.device()
    steps = [stepper(backend, shape, strategy, device) for backend in (None, *BACKENDS)]
    for _ in range(4):  # compiles
        [step() for step in steps]
    times = [[step() for step in steps] for _ in range(rounds)]
    middle = [median(wall for wall, _ in column) * 1e3 for column in zip(*times, strict=True)]
    ratios = [median(native[i] / hlo[i] for _, hlo, native in times) for i in range(2)]
    params = list(GPT(shape).parameters())
    size = f"{sum(p.numel() for p in params) / 1e6:5.2f} M in {len(params):3} tensors"
    return f"{name:8} {size}  {middle[0]:8.1f} {middle[1]:8.1f} {middle[2]:8.1f}  {ratios[0]:5.2f} {ratios[1]:5.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)  # of a process of its own
    given = parser.parse_args(argv)
    if given.shape:
        print(measure(given.shape, given.strategy, given.rounds))
        return
    print(f"{given.strategy}: ms of a step: no update, HLO, native; native / HLO of time and of CPU time")
    for name in SHAPES:
        for _ in range(given.processes):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shape", name], check=True)


if __name__ == "__main__":
    main()
