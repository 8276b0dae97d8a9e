"""A byte-level GPT under every variant, at three decays and three seeds; what its updates were, and what was kept."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from gpt import Shape
from text_data import load
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import collage_neuron
from collage_neuron.monitoring.metrics import Record
from collage_neuron.states.store import read_exact
from study.ensemble import Ensemble, Group, schedule
from study.jobs import Job
from study.variants import RELEASED, TRAINED, adamw

BETA2 = (0.95, 0.99, 0.999)
LR = 5e-4
SHAPE = Shape(batch=8, block=32, width=32, heads=4, layers=2)
QUICK = {"steps": 40, "seeds": [0, 1], "shape": {"batch": 4, "block": 16, "width": 16, "heads": 2, "layers": 1}}
FULL = {"steps": 600, "seeds": [0, 1, 2], "shape": vars(SHAPE)}
NAMES = TRAINED
QUICK_NAMES = ("bf16", "plus", "split433", "fp32", RELEASED)
CHECKS = 20
"""How often a run is measured."""


def jobs(quick: bool, _: Any) -> Iterator[Job]:
    for name in QUICK_NAMES if quick else NAMES:
        for beta2 in BETA2[-1:] if quick else BETA2:
            yield job("language", name, name, beta2, 1.0, quick)


def job(part: str, title: str, variant: str, beta2: float, factor: float, quick: bool) -> Job:
    """The runs of one variant at one decay, with `factor` times the learning rate."""
    settings = {"variant": variant, "beta2": beta2, "lr": LR * factor, **(QUICK if quick else FULL)}
    return Job(part, f"{title} {beta2:g}", settings)


class ExactSquares:
    """The second moment of the same gradients in float64, beside the one that the optimizer keeps."""

    def __init__(self, params: Mapping[str, Tensor], beta2: float) -> None:
        self.params, self.beta2 = params, beta2
        self.v = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}

    def update(self) -> None:
        for name, p in self.params.items():
            assert p.grad is not None
            g = p.grad.double()
            self.v[name].mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)

    def step_size(self, optimizer: Optimizer, steps_taken: int) -> float:
        """||m / (sqrt(v) + eps)|| with the optimizer's v, as a multiple of the same with the exact one."""
        eps = 1e-8 * (1 - self.beta2**steps_taken) ** 0.5  # v is not corrected for its start here
        kept = exact = 0.0
        for name, p in self.params.items():
            state = optimizer.state[p]
            m, v = (read_exact(p, state, key).double() for key in ("exp_avg", "exp_avg_sq"))
            kept += float((m / (v.sqrt() + eps)).square().sum())
            exact += float((m / (self.v[name].sqrt() + eps)).square().sum())
        return math.sqrt(kept / exact)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Losses of each seed in nats per byte, and what was measured of the updates along the way."""
    shape, steps, beta2 = Shape(**settings["shape"]), settings["steps"], settings["beta2"]
    text = load(None, shape)
    runs = Ensemble(shape, [Group(settings["lr"], (seed,)) for seed in settings["seeds"]])
    groups = [{"params": list(p.values())} for p in runs.params]
    optimizer = adamw(settings["variant"], groups, lr=settings["lr"], betas=(0.9, beta2), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, schedule(steps))
    monitor = None
    if isinstance(optimizer, collage_neuron.Compiled):
        monitor = collage_neuron.monitor(optimizer, every=max(1, steps // CHECKS))
    squares = [ExactSquares(p, beta2) for p in runs.params]
    held_out, feed = runs.held_out(text.valid, 8), runs.feed(text.train)
    found: dict[str, Any] = {"steps": [], "validation": [], "step size": [], "training": []}
    for step, batch in enumerate(islice(feed, steps), 1):
        optimizer.zero_grad()
        losses = runs.losses(batch)
        losses.sum().backward()
        optimizer.step()
        scheduler.step()
        for s in squares:
            s.update()
        found["training"].append(losses.detach())
        if step % max(1, steps // CHECKS) == 0:
            found["steps"].append(step)
            found["validation"].append(runs.validate(held_out).tolist())
            found["step size"].append([s.step_size(optimizer, step) for s in squares])
    return {
        **found,
        **(updates(monitor.history) if monitor else {}),
        "training": last_losses(found["training"]),
        "bytes a parameter": bytes_per_parameter(optimizer),
    }


def updates(records: Sequence[Record]) -> dict[str, Any]:
    """What was measured of the updates: for each measured step a row with a number for each group."""
    rows = [[record.groups[i] for i in sorted(record.groups)] for record in records]
    return {
        "measured steps": [record.step for record in records],
        "edq": [[m.pair.ratio for m in row] for row in rows],
        "edq high": [[m.high.ratio for m in row] for row in rows],
        "length": [[m.pair.norm / m.raw_norm if m.raw_norm else math.nan for m in row] for row in rows],
        "lost": [[m.pair.lost for m in row] for row in rows],
        "lost high": [[m.high.lost for m in row] for row in rows],
        "stalled": [[m.stalled["exp_avg_sq"] for m in row] for row in rows],
    }


def last_losses(losses: Sequence[Tensor]) -> list[float]:
    """The mean of the last twentieth of the steps, for each run: single batches are noisy."""
    last: list[float] = torch.stack(list(losses[-max(1, len(losses) // 20) :])).mean(0).tolist()
    return last


def bytes_per_parameter(optimizer: Optimizer) -> float | None:
    """Bytes a parameter with its gradient; None for what is not compiled."""
    if isinstance(optimizer, collage_neuron.Compiled):
        return collage_neuron.bytes_per_parameter(optimizer)
    return None
