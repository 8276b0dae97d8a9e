"""A noisy quadratic: excess loss after 1500 steps, by variant and decay, beside fp32 at matched learning rates."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from collage_neuron.states.store import read_exact
from study.jobs import Job, Record, needed
from study.variants import RELEASED, TRAINED, adamw

BETA2 = (0.95, 0.99, 0.999)
ELEMENTS = 4096
CONDITION = 100.0
LR = 3e-3
NOISE = 0.1
DISTANCE = 0.3
CONTROLS = ("bf16", "light", RELEASED)
"""Variants whose second moment is wrong: for each, fp32 also runs at the learning rate that its error amounts to."""

QUICK = (*CONTROLS, "plus", "split433", "fp32_states", "fp32")


def jobs(quick: bool, results: Mapping[str, Mapping[str, Record]]) -> Iterator[Job]:
    common = {"steps": 60 if quick else 1500, "seeds": [0, 1, 2]}
    for name in QUICK if quick else TRAINED:
        yield Job("quadratic", name, {"variant": name, "factors": [1.0] * len(BETA2), **common})
    controls = {f"fp32 like {name}": _step_sizes(needed(results, "second_moment", name)) for name in CONTROLS}
    for title, factors in {"fp32 x 1.5": [1.5] * len(BETA2), **controls}.items():
        yield Job("quadratic", title, {"variant": "fp32", "factors": factors, **common})


def _step_sizes(record: Record) -> list[float]:
    """By how much the variant's second moment lengthens a step, on random gradients, at each decay."""
    found = record["result"]["step size"]
    return [round(found[f"{beta2:g}"]["random"], 3) for beta2 in BETA2]


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """The excess loss of each seed by decay, of the kept weights (hi + lo) and of those a model would compute with."""
    seeds, steps = settings["seeds"], settings["steps"]
    drawn = [torch.randn(2, ELEMENTS, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    start, way = torch.stack(drawn, dim=1)
    target = start + DISTANCE * way
    curvature = torch.logspace(0, -math.log10(CONDITION), ELEMENTS)
    params = [torch.nn.Parameter(start.clone()) for _ in BETA2]
    groups = [
        {"params": [p], "lr": LR * factor, "betas": (0.9, beta2)}
        for p, factor, beta2 in zip(params, settings["factors"], BETA2, strict=True)
    ]
    optimizer = adamw(settings["variant"], groups, lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    scheduler = CosineAnnealingLR(optimizer, steps)
    noise = [torch.Generator().manual_seed(1000 + s) for s in seeds]
    for _ in range(steps):
        error = torch.stack([torch.randn(ELEMENTS, generator=g) for g in noise]) * NOISE
        for p in params:
            p.grad = (curvature * (p.detach().float() - target) + error).bfloat16()
        optimizer.step()
        scheduler.step()

    def excess(theta: Tensor) -> list[float]:
        found: list[float] = (0.5 * curvature * (theta - target) ** 2).mean(-1).tolist()
        return found

    kept = [excess(read_exact(p, optimizer.state[p], "param")) for p in params]
    words = [excess(p.detach().float()) for p in params]
    names = [f"{beta2:g}" for beta2 in BETA2]
    return {"kept": dict(zip(names, kept, strict=True)), "words": dict(zip(names, words, strict=True))}
