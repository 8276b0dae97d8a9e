"""A byte-level GPT trained with Muon for its matrices and AdamW for the rest: validation losses and bytes.

    python benchmarks/muon_gpt.py                # ten minutes on two cores; stores and prints
    python benchmarks/muon_gpt.py plus fp32      # trains these, and keeps what is stored of the others
    python benchmarks/muon_gpt.py --show         # prints what is stored, as docs/as_written.md has it

Two optimizers, as Muon's authors advise: torch's Muon on matrices between layers (its step runs as written), and
torch's AdamW on the embedding, the head and the gains of the norms (compiled). Every contender starts from the same
bf16 numbers and sees the same batches of text: Python's own library. Losses are those of the weights that the model
reads.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from gpt import GPT, Shape
from study.ensemble import schedule
from text_data import batches, load
from torch import nn
from torch.nn import functional as F

import collage_neuron

RECORDS = Path(__file__).parent / "results" / "muon_gpt.json"
STRATEGIES: dict[str, tuple[Any, Any]] = {
    "plus": ("plus", "plus"),
    "split433": ("split433", "split433"),
    "8-bit momentum, `split422`": ({"param": "bf16+int16", "momentum_buffer": "i8q4"}, "split422"),
}
"""The strategies of Muon and of AdamW."""
CONTENDERS = ("bf16", *STRATEGIES, "fp32")
SEEDS = (0, 1, 2)
STEPS = 600
SHAPE = Shape(batch=8, block=48, width=64, heads=4, layers=2)
MUON_RATE, ADAMW_RATE, DECAY = 0.02, 1e-3, 0.1
HELD_OUT = 32
"""Batches of held-out text."""

HEAD = ("", "Muon's bytes", "AdamW's bytes", "all", "validation loss of each seed", "mean", "beside fp32")


def optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for the embeddings, the head and the norms."""
    between = [p for name, p in model.named_parameters() if p.dim() == 2 and ("attend" in name or "think" in name)]
    rest = [p for p in model.parameters() if not any(p is q for q in between)]
    return (
        torch.optim.Muon(between, lr=MUON_RATE, weight_decay=DECAY),
        torch.optim.AdamW(rest, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=DECAY, foreach=False),
    )


def train(name: str, seed: int, steps: int = STEPS, shape: Shape = SHAPE) -> dict[str, Any]:
    """The validation loss in nats per byte, and bytes per parameter (gradient included) of both optimizers."""
    torch.manual_seed(seed)
    text, model = load(None, shape), GPT(shape).bfloat16()
    model.to(torch.float32 if name == "fp32" else torch.bfloat16)
    both: Sequence[Any] = optimizers(model)
    if name in STRATEGIES:
        both = [collage_neuron.compile(o, strategy=s) for o, s in zip(both, STRATEGIES[name], strict=True)]
    rates = [group["lr"] for optimizer in both for group in optimizer.param_groups]
    factor = schedule(steps)
    for step, batch in enumerate(islice(batches(text.train, shape, seed), steps)):
        for rate, optimizer in zip(rates, both, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor(step)
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in both:
            optimizer.step()
    with torch.no_grad():
        losses = [float(loss_of(model, batch)) for batch in islice(batches(text.valid, shape, 0), HELD_OUT)]
    sizes = [(bytes_of(optimizer), elements_of(optimizer)) for optimizer in both]
    return {"loss": fmean(losses), "bytes": [size / count for size, count in sizes], "elements": [n for _, n in sizes]}


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next byte."""
    return F.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def elements_of(optimizer: Any) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def bytes_of(optimizer: Any) -> float:
    """Bytes of parameters, gradients and states."""
    if isinstance(optimizer, collage_neuron.Compiled):
        return collage_neuron.bytes_per_parameter(optimizer) * elements_of(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [x for p in params for x in optimizer.state[p].values() if x.dim()]
    return float(sum(x.nbytes for x in (*params, *(p.grad for p in params), *states)))


def rows(records: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """The rows of the table, in the order of CONTENDERS."""
    fp32 = fmean(run["loss"] for run in records["fp32"])
    found = []
    for name in CONTENDERS:
        runs = records[name]
        mean, sizes, counts = fmean(run["loss"] for run in runs), runs[0]["bytes"], runs[0]["elements"]
        whole = sum(size * count for size, count in zip(sizes, counts, strict=True)) / sum(counts)
        losses = ", ".join(f"{run['loss']:.4f}" for run in runs)
        shown = f"`{name}`" if name in ("plus", "split433") else name
        found.append((shown, *(f"{x:.3g}" for x in (*sizes, whole)), losses, f"{mean:.4f}", f"{mean - fp32:+.4f}"))
    return found


def table(records: dict[str, list[dict[str, Any]]]) -> str:
    """The table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows(records)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CONTENDERS)}; default: all")
    given = parser.parse_args()
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    logging.getLogger("collage_neuron").setLevel(logging.ERROR)
    for name in () if given.show else given.names or CONTENDERS:
        records[name] = [train(name, seed) for seed in SEEDS]
        RECORDS.write_text(json.dumps({n: records[n] for n in CONTENDERS if n in records}, indent=1) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
