"""The weights after 2000 steps of AdamW, against float64, as a fraction of the distance travelled."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from oracles import (
    DRIFT_STREAMS,
    ELEMENTS,
    STEPS,
    Driver,
    Setting,
    adamw64,
    decay_slots,
    distance_error,
    drift_streams,
    initial_weights,
    start64,
)
from torch import Tensor

from study.jobs import Job
from study.variants import VARIANTS

STARTS = {"normal": 0.02, "one": 1.0}
"""theta ~ N(0, 0.02) as in a linear layer, or theta = 1 as in the gain of a layer norm."""


def jobs(quick: bool, _: Any) -> Iterator[Job]:
    for name in VARIANTS:
        yield Job("weights", name, {"variant": name, "steps": 100 if quick else STEPS, "seed": [1, 2]})


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """By start and stream: the error, the weights that never moved, and the weight decay that arrived."""
    setting = Setting()
    return {start: _errors(settings, setting, _start(start)) for start in STARTS}


def _start(name: str) -> Tensor:
    if name == "normal":
        return initial_weights(len(DRIFT_STREAMS))
    return torch.ones(len(DRIFT_STREAMS), ELEMENTS, dtype=torch.bfloat16)


def _errors(settings: dict[str, Any], setting: Setting, start: Tensor) -> dict[str, dict[str, float]]:
    variant, steps = VARIANTS[settings["variant"]], settings["steps"]
    decay = torch.tensor([setting.weight_decay, 0.0], dtype=torch.float64)[:, None, None]
    exact = start64(start)
    driver = Driver(start.expand(2, -1, -1), variant.strategy, variant.arithmetic)
    for t, (g, slots) in enumerate(islice(zip(drift_streams(), decay_slots(setting, steps), strict=False), steps), 1):
        exact = adamw64(exact, g, t, lr=setting.lr, betas=setting.betas, eps=1e-8, weight_decay=decay)
        driver.step(g, slots)
    theta = driver.value("param")
    found = {
        "error": distance_error(theta[0], exact.theta[0], start.double()),
        "unmoved": (theta[0] == start).double().mean(-1),
        "realised decay": _projection(theta[0] - theta[1], exact.theta[0] - exact.theta[1]),
    }
    return {key: dict(zip(DRIFT_STREAMS, values.tolist(), strict=True)) for key, values in found.items()}


def _projection(taken: Tensor, nominal: Tensor) -> Tensor:
    """What decay took from the weights as a fraction of what it should have, rows apart."""
    return (taken * nominal).sum(-1) / (nominal * nominal).sum(-1)
