"""AdamW in float64 on the stream of a condition: what errors are measured against."""

from __future__ import annotations

from typing import NamedTuple

import torch
from oracles import adamw64, distance_error, start64
from torch import Tensor

from accuracy.conditions import ROWS, Stream


class Exact(NamedTuple):
    """The weights before and after a run, as float64."""

    start: Tensor
    theta: Tensor

    def errors(self, found: Tensor) -> list[float]:
        """||theta - theta64|| / ||theta64 - theta0|| of each seed."""
        seeds = [x.double().unflatten(0, (-1, ROWS)).flatten(1) for x in (found, self.theta, self.start)]
        errors: list[float] = distance_error(*seeds).tolist()
        return errors


def exact(stream: Stream, steps: int, start: Tensor | None = None) -> Exact:
    """Trains in float64, from the weights of the stream or from `start`."""
    condition = stream.condition
    first = stream.start if start is None else start
    s = start64(first)
    with torch.no_grad():
        for t, g in enumerate(stream.gradients(steps)):
            s = adamw64(
                s,
                g,
                t + 1,
                lr=condition.rate(t, steps),
                betas=condition.betas,
                eps=condition.eps,
                weight_decay=condition.weight_decay,
            )
    return Exact(first.double(), s.theta)
