"""Times a whole training step on torch_xla's CPU device: the update as HLO, and as native code on memory lent to XLA.

A step is forward, backward, update and all syncs, of `examples/gpt.py`'s model. Each contender takes one step a round;
the ratios are medians over rounds, of times and of CPU seconds of all threads, which other processes disturb less::

    python benchmarks/xla_native.py                                     # the table in README.md: four minutes
    python benchmarks/xla_native.py --strategy light --rounds 21 --processes 5
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
sys.path.append(str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, Shape
from report import machine, save, settings_of
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


def measure(name: str, strategy: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step without an update and with each backend's, and the ratios of these, of time and CPU time.

    Medians over rounds.
    """
    import torch_xla

    logging.getLogger("collage_neuron").setLevel(logging.WARNING)
    shape, device = SHAPES[name], torch_xla.device()
    steps = [stepper(backend, shape, strategy, device) for backend in (None, *BACKENDS)]
    for _ in range(4):  # compiles
        [step() for step in steps]
    times = [[step() for step in steps] for _ in range(rounds)]
    params = list(GPT(shape).parameters())
    return {
        "shape": name,
        "parameters": sum(p.numel() for p in params),
        "tensors": len(params),
        "ms": [median(wall for wall, _ in column) * 1e3 for column in zip(*times, strict=True)],
        "ratios": [median(native[i] / hlo[i] for _, hlo, native in times) for i in range(2)],
    }


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of several processes."""
    lists = {k: [median(column) for column in zip(*(r[k] for r in runs), strict=True)] for k in ("ms", "ratios")}
    return runs[0] | lists


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['shape']:8} {row['parameters'] / 1e6:5.2f} M in {row['tensors']:3} tensors  "
        + "".join(f"{ms:9.1f}" for ms in row["ms"])
        + "  "
        + "".join(f"{ratio:6.2f}" for ratio in row["ratios"])
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="plus")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)  # of a process of its own
    given = parser.parse_args(argv)
    if given.shape:
        print(json.dumps(measure(given.shape, given.strategy, given.rounds)))
        return
    print(f"{given.strategy}: ms of a step: no update, HLO, native; native / HLO of time and of CPU time")
    rows = []
    for name in SHAPES:
        own = ["--strategy", given.strategy, "--rounds", str(given.rounds), "--shape", name]
        command = [sys.executable, __file__, *own]
        done = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(given.processes)]
        rows.append(middle([json.loads(each.stdout.splitlines()[-1]) for each in done]))
        print(line(rows[-1]), flush=True)
    if given.json:
        save(given.json, {"machine": machine(), "settings": settings_of(given), "rows": rows})


if __name__ == "__main__":
    main()
