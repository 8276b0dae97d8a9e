"""Trains a byte-level GPT with matmuls in bf16 and in fp8, by each way to find scales, and compares validation losses.

A run is a seed, a way, and a factor of the loss, which scales all gradients. Results are added to a file of JSON as
they come, and what is there is not run again; `--table` prints them.

    python benchmarks/fp8_training.py --seeds 0 1 --steps 200 --out fp8.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from gpt import GPT, Shape
from text_data import batches, load
from torch.nn import functional as F

import collage_neuron
from collage_neuron.matmuls.install import forward_of
from collage_neuron.matmuls.scales import Scales
from collage_neuron.passes.scaling import plan

SHAPE = Shape(batch=8, block=32, width=64, heads=4, layers=2)
FACTORS = (1.0, 1e-4)


def unscaled(scales: Scales, exponents: dict[str, int], device: torch.device) -> None:
    """In the place of `Scales.include`: every exponent is 0."""
    _include(scales, dict.fromkeys(exponents, 0), device)


_include = Scales.include
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8, inferred": {"matmul": "fp8", "rescale": 0},
    "fp8, inferred and measured": {"matmul": "fp8"},
    "fp8, largest magnitudes": {"matmul": "fp8", "rescale": 0},
    "fp8, unscaled": {"matmul": "fp8", "rescale": 0},
}
"""What is given to `compile`; the last two also exchange how a scale is found."""


def exchanged(way: str) -> Callable[[], None]:
    """Exchanges how scales are found; returns what puts it back."""
    known = vars(plan)["known"]
    if way.endswith("magnitudes"):
        vars(plan)["known"] = lambda size: False
    if way.endswith("unscaled"):
        Scales.include = unscaled  # type: ignore[method-assign,assignment]  # for one run

    def back() -> None:
        vars(plan)["known"] = known
        Scales.include = _include  # type: ignore[method-assign]  # as above

    return back


def train(way: str, factor: float, seed: int, steps: int, lr: float = 3e-3) -> dict[str, Any]:
    """The validation loss after some steps, and what happened to operands in the step before the last measurement."""
    corpus = load(None, SHAPE)
    torch.manual_seed(seed)
    model = GPT(SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-8 * factor)
    back = exchanged(way)
    try:
        model, optimizer = collage_neuron.compile(model, optimizer, **WAYS[way])
        data = batches(corpus.train, SHAPE, seed)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1, (step + 1) / 20) * (1 - step / steps)
            (loss_of(model, next(data)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        held = batches(corpus.valid, SHAPE, 0)
        with torch.no_grad():
            loss = sum(float(loss_of(model, next(held))) for _ in range(40)) / 40
    finally:
        back()
    forward = forward_of(model)
    reductions = 0 if forward is None else len(forward.backend.graphs[0].plan.reductions)
    return {"way": way, "factor": factor, "seed": seed, "steps": steps, "loss": loss, "reductions": reductions}


def loss_of(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """Of each byte from those before it."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One row for each way: the loss of every seed, and its mean distance from bf16's."""
    seeds = sorted({r["seed"] for r in records})
    yield "| loss times | matmuls | reductions in a step | " + " | ".join(f"seed {s}" for s in seeds) + " | - bf16 |"
    yield "|---|---|---|" + "---|" * (len(seeds) + 1)
    for factor in sorted({r["factor"] for r in records}, reverse=True):
        found = {(r["way"], r["seed"]): r for r in records if r["factor"] == factor}
        for way in WAYS:
            if all((w, s) in found for s in seeds for w in (way, "bf16")):
                losses = [found[way, s]["loss"] for s in seeds]
                off = sum(x - found["bf16", s]["loss"] for x, s in zip(losses, seeds, strict=True)) / len(seeds)
                numbers = " | ".join(f"{x:.4f}" for x in losses)
                yield f"| {factor:g} | {way} | {found[way, seeds[0]]['reductions']} | {numbers} | {off:+.4f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "fp8_training.json")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    there = {(r["way"], r["factor"], r["seed"], r["steps"]) for r in records}
    wanted = [(w, f, s) for s in options.seeds for f in FACTORS for w in options.ways]
    for way, factor, seed in [] if options.table else wanted:
        if (way, factor, seed, options.steps) not in there:
            records.append(train(way, factor, seed, options.steps))
            options.out.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(table(records)))


if __name__ == "__main__":
    main()
