"""Seeds x learning rates: the width of the usable region, diverged runs and sharpness, by strategy and by format."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from gpt import Shape
from text_data import load
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from study.ensemble import Ensemble, Group, schedule
from study.jobs import Job
from study.language import last_losses
from study.sharpness import sharpness
from study.variants import adamw

SHAPE = {"batch": 8, "block": 32, "width": 32, "heads": 2, "layers": 1}
LRS = [1e-3 * 2**octave for octave in range(9)]
FULL = {"steps": 300, "seeds": [0, 1, 2], "lrs": LRS, "shape": SHAPE}
QUICK = {"steps": 30, "seeds": [0], "lrs": LRS[::3], "shape": SHAPE}
BETA2 = 0.95
CHECKS = 10
STRATEGIES = ("bf16", "stochastic", "light", "plus", "split433", "fp32_states", "fp32")
FORMATS = {"truncation": (6, 5, 4, 3), "nearest": (7, 5, 4, 3), "stochastic": (4, 3)}
"""Mantissa bits by rounding; E8M7 is bf16."""


def jobs(quick: bool, _: Any) -> Iterator[Job]:
    common = QUICK if quick else FULL
    for name in STRATEGIES:
        if not quick or name in ("bf16", "plus", "split433", "fp32"):
            yield Job("grid", name, {"variant": name, **common})
    for rounding, mantissas in FORMATS.items():
        for mantissa in mantissas[-1:] if quick else mantissas:
            fmt = [mantissa, rounding]
            yield Job("grid", f"E8M{mantissa} {rounding}", {"variant": "fp32", "format": fmt, **common})


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """By learning rate and seed: the last losses, and along the way the losses and the sharpness of the last logits."""
    shape, steps, seeds = Shape(**settings["shape"]), settings["steps"], tuple(settings["seeds"])
    text = load(None, shape)
    groups = [Group(lr, seeds) for lr in settings["lrs"]]
    fmt = settings.get("format")
    torch.manual_seed(0)  # of stochastic rounding; each group's weights have their seeds
    runs = Ensemble(shape, groups, tuple(fmt) if fmt else None)
    params = [{"params": list(p.values()), "lr": g.lr} for p, g in zip(runs.params, groups, strict=True)]
    optimizer = adamw(settings["variant"], params, lr=LRS[0], betas=(0.9, BETA2), weight_decay=0.1)
    scheduler = LambdaLR(optimizer, schedule(steps))
    held_out, feed = runs.held_out(text.valid, 4), runs.feed(text.train)
    training: list[Tensor] = []
    found: dict[str, Any] = {"steps": [], "loss": [], "sharpness": []}
    for step, batch in enumerate(islice(feed, steps), 1):
        optimizer.zero_grad()
        losses = runs.losses(batch)
        losses.sum().backward()
        optimizer.step()
        scheduler.step()
        training.append(losses.detach())
        if step % max(1, steps // CHECKS) == 0:
            found["steps"].append(step)
            found["loss"].append(_by_group(losses.detach(), seeds))
            found["sharpness"].append(_by_group(_sharpness(runs, held_out), seeds))
    return found | {
        "training": _by_group(torch.tensor(last_losses(training)), seeds),
        "validation": _by_group(runs.validate(held_out), seeds),
        "entropy": _entropy(text.train),
    }


@torch.no_grad()
def _sharpness(runs: Ensemble, held_out: list[Tensor]) -> Tensor:
    """The mean sharpness of the last token's logits, for each run."""
    each = [sharpness(runs.logits(b[:, :, :-1])[:, :, -1], b[:, :, -1]).mean(-1) for b in held_out]
    return torch.stack(each).mean(0)


def _by_group(values: Tensor, seeds: tuple[int, ...]) -> list[list[float]]:
    """[learning rate][seed]."""
    found: list[list[float]] = values.unflatten(0, (-1, len(seeds))).tolist()
    return found


def _entropy(text: Tensor) -> float:
    """The loss, in nats per byte, of a model that knows how frequent each byte is and nothing else."""
    p = torch.bincount(text.int(), minlength=256).double() / len(text)
    return -float(torch.special.xlogy(p, p).sum())
