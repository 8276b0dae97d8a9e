"""Logs of runs as a monitor writes them, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Write = Callable[..., Path]
"""Writes a log: its name, and its lines."""

ABOUT = {"strategy": "plus", "bytes_per_parameter": 12.0}


def measures(ratio: float) -> dict[str, Any]:
    effect = {"norm": 1.0, "edq": ratio, "ratio": ratio, "lost": 100 * (1 - ratio)}
    return {"elements": 4, "raw_norm": 1.0, "pair": effect, "high": effect, "stalled": {"exp_avg_sq": 12.5}}


def line(step: int, ratio: float = 0.5) -> dict[str, Any]:
    modules = {"head": measures(ratio), "body.0": measures(1.0)}
    return {"step": step, "loss": 3.0 / step, "total": measures(ratio), "modules": modules, "memory": {"peak": 2**20}}
