"""The figure of `compare`, an HTML page: losses over the memory of each strategy, and over the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from collage_neuron.cli.charts import BASELINES, COLOURS, THICK, THIN, Figure
from collage_neuron.cli.compare_table import UNCOMPILED, Run, strategies_of
from collage_neuron.cli.html_page import Card, document

POINTS = 400
"""Maximal number of points of a curve of losses; of more, neighbours are averaged."""


def figure_page(runs: Sequence[Run], heading: str, sentences: Sequence[str]) -> str:
    """The page. Raises ModuleNotFoundError if plotly is not installed."""
    seeds = len({run.seed for run in runs})
    cards: list[Card] = []
    if memory := loss_over_memory(runs):
        bars = "; bars: the standard deviation between seeds" if seeds > 1 else ""
        cards.append(("Loss over memory", f"final loss of each strategy{bars}", memory))
    cards.append(("Loss over the run", "of the first seed" if seeds > 1 else "", loss_curves(runs)))
    return document(heading, sentences, "", [cards], "compare")


def loss_over_memory(runs: Sequence[Run]) -> Figure | None:
    """A point for each strategy: bytes per parameter, mean final loss, and its spread between seeds."""
    data = [
        _point(name, [run for run in runs if run.strategy == name], i) for i, name in enumerate(strategies_of(runs))
    ]
    layout = {
        "showlegend": False,
        "xaxis": {"title": {"text": "bytes per parameter, gradient included"}},
        "yaxis": {"title": {"text": "final loss"}},
        "height": 380,
    }
    kept = [point for point in data if point is not None]
    return {"data": kept, "layout": layout} if kept else None


def _point(name: str, own: Sequence[Run], i: int) -> dict[str, Any] | None:
    if name == UNCOMPILED:
        return None
    finals = [run.final for run in own if math.isfinite(run.final)]
    if not finals:
        return None
    spread = stdev(finals) if len(finals) > 1 else 0.0
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": name,
        "x": [own[0].bytes_per_parameter],
        "y": [fmean(finals)],
        "text": [name],
        "textposition": "top center",
        "error_y": {"type": "data", "array": [spread], "visible": spread > 0, "thickness": 1.2},
        "marker": {"size": 9 if name in BASELINES else 12},
        "hovertemplate": f"{name}: %{{y:.4f}} ± {spread:.4f}, %{{x:g}} bytes<extra></extra>",
        "meta": i % COLOURS,
    }


def loss_curves(runs: Sequence[Run]) -> Figure:
    """The losses of the first seed: over the steps, or in the order in which a process printed them."""
    first = [run for run in runs if run.seed == runs[0].seed]
    printed = any(not math.isnan(run.whole) for run in first)
    traces = [_curve(run, i) for i, run in enumerate(first)]
    traces.sort(key=lambda trace: -trace["line"]["width"])
    return {
        "data": traces,
        "layout": {
            "hovermode": "x unified",
            "xaxis": {"title": {"text": "printed loss" if printed else "step"}},
            "yaxis": {"title": {"text": "loss"}},
            "height": 380,
        },
    }


def _curve(run: Run, i: int) -> dict[str, Any]:
    size = -(-len(run.losses) // POINTS)
    pieces = [run.losses[k : k + size] for k in range(0, len(run.losses), size)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": run.strategy,
        "x": [1 + k * size for k in range(len(pieces))],
        "y": [round(mean, 5) if math.isfinite(mean := fmean(piece)) else None for piece in pieces],
        "line": {"width": THIN if run.strategy in (*BASELINES, UNCOMPILED) else THICK[1]},
        "meta": i % COLOURS,
    }
