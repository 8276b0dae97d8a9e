"""The figure of `compare`, an HTML page: losses over the memory of each strategy, and over the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from collage_neuron.cli.charts import BASELINES, COLOURS, THICK, THIN, Figure
from collage_neuron.cli.compare_table import UNCOMPILED, Run, strategies_of
from collage_neuron.cli.html_page import Card, document
from collage_neuron.cli.name_places import SPACE, axis_range, positions

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
    kept = [point for point in data if point is not None]
    if not kept:
        return None
    ranges = _ranges(kept)
    bars = [p["error_y"]["array"][0] for p in kept]
    places = positions([p["name"] for p in kept], [(p["x"][0], p["y"][0]) for p in kept], ranges, bars)
    marks = _marks(kept)
    return {
        "data": [p | {"textposition": at, "marker": mark} for p, at, mark in zip(kept, places, marks, strict=True)],
        "layout": {
            "showlegend": False,
            "xaxis": {"title": {"text": "bytes per parameter, gradient included"}, "range": ranges[0], "dtick": 2},
            "yaxis": {"title": {"text": "final loss"}, "range": ranges[1]},
            "height": 380,
        },
    }


def _marks(points: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Sizes of the marks: the second of as many bytes is smaller, so that both are seen if their losses are equal."""
    seen: Counter[float] = Counter()
    for point in points:
        if point["name"] in BASELINES:
            yield {"size": 9}
        else:
            yield {"size": max(13 - 5 * seen[point["x"][0]], 4)}
            seen[point["x"][0]] += 1


def _ranges(points: Sequence[dict[str, Any]]) -> tuple[tuple[float, float], tuple[float, float]]:
    """The ranges of both axes, with room for the bars and for names."""
    ends = [p["y"][0] + sign * p["error_y"]["array"][0] for p in points for sign in (-1, 1)]
    return axis_range([p["x"][0] for p in points], SPACE[0]), axis_range(ends, SPACE[1])


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
        "error_y": {"type": "data", "array": [spread], "visible": spread > 0, "thickness": 1.2},
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
