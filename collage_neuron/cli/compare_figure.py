"""The page of `compare`: the table, and each strategy's loss above that of fp32, over memory and over the run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, stdev
from typing import Any

from collage_neuron.cli.charts import BASELINES, THICK, THIN, Figure, running_mean, squeezed, squeezed_axis
from collage_neuron.cli.compare_table import UNCOMPILED, Run, above, cells, is_printed, strategies_of
from collage_neuron.cli.html_page import Card, document, table
from collage_neuron.cli.name_places import SPACE, axis_range, positions
from collage_neuron.cli.palette import assigned

POINTS = 400
"""Maximal number of points of a curve; of more, neighbours are averaged."""


def figure_page(runs: Sequence[Run], heading: str, sentences: Sequence[str]) -> str:
    """The page. Raises ModuleNotFoundError if plotly is not installed."""
    seeds = len({run.seed for run in runs})
    cards: list[Card] = []
    if memory := loss_over_memory(runs):
        bars = "; bars: the standard deviation between seeds" if seeds > 1 else ""
        compared = " minus that of fp32 from the same seed" if _fp32(runs) else ""
        cards.append(("Loss over memory", f"final loss of each strategy{compared}{bars}", memory))
    if _fp32(runs):
        spread = ", mean over the seeds; shaded: their standard deviation" if seeds > 1 else ""
        note = f"minus the loss of fp32 from the same seed, a running mean{spread}; in the grey band the axis is linear"
        cards.append(("Loss above fp32 over the run", note, differences(runs)))
    shown = [run for run in runs if run.strategy == "fp32"] or runs
    what = "of fp32, which the others are compared with" if shown is not runs else "there is no fp32 to compare with"
    cards.append(("Loss over the run", f"of the first seed; {what}", loss_curves(shown)))
    head, rows = cells(runs)
    return document(heading, sentences, table(head, rows, colours(runs)), [cards], "compare")


def colours(runs: Sequence[Run]) -> list[str]:
    """What the palette calls the colour of each strategy."""
    return assigned(strategies_of(runs))


def _fp32(runs: Sequence[Run]) -> bool:
    """Returns True if there is something to compare with fp32."""
    names = strategies_of(runs)
    return "fp32" in names and len(names) > 1


def loss_over_memory(runs: Sequence[Run]) -> Figure | None:
    """A point for each strategy: bytes per parameter, and its final loss, above fp32's where that was trained."""
    names = strategies_of(runs)
    data = [_point(name, runs, colour) for name, colour in zip(names, colours(runs), strict=True)]
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
            "yaxis": {"title": {"text": "final loss above fp32" if _fp32(runs) else "final loss"}, "range": ranges[1]},
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


def _point(name: str, runs: Sequence[Run], colour: str) -> dict[str, Any] | None:
    own = [run for run in runs if run.strategy == name]
    found = above(name, runs) if _fp32(runs) else [run.final for run in own]
    finals = [loss for loss in found if math.isfinite(loss)]
    if name == UNCOMPILED or not finals:
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
        "meta": colour,
    }


def differences(runs: Sequence[Run]) -> Figure:
    """The loss above that of fp32 from the same seed, along the run: the mean over the seeds, and their spread."""
    data: list[dict[str, Any]] = []
    for name, colour in zip(strategies_of(runs), colours(runs), strict=True):
        if name != "fp32" and (curves := _above(name, runs)):
            data += _band(name, colour, curves)
    return {
        "data": data,
        "layout": {**squeezed_axis("loss above fp32"), "xaxis": {"title": {"text": _count(runs)}}, "height": 380},
    }


def _above(name: str, runs: Sequence[Run]) -> list[list[float]]:
    """For each seed, the running mean of the loss minus that of fp32."""
    fp32 = {run.seed: run.losses for run in runs if run.strategy == "fp32"}
    own = [run for run in runs if run.strategy == name and run.seed in fp32]
    return [running_mean([a - b for a, b in zip(run.losses, fp32[run.seed], strict=False)]) for run in own]


def _band(name: str, colour: str, curves: Sequence[Sequence[float]]) -> Iterator[dict[str, Any]]:
    """The mean of several curves, and before it the region of one standard deviation to each side, if there is one."""
    every = -(-min(map(len, curves)) // POINTS)
    kept = list(enumerate(zip(*curves, strict=False), 1))[::every]
    found = {step: row for step, row in kept if all(map(math.isfinite, row))}
    steps, means = list(found), [fmean(row) for row in found.values()]
    common = {"type": "scatter", "mode": "lines", "name": name, "meta": colour, "legendgroup": name}
    if len(curves) > 1:
        off = [stdev(row) for row in found.values()]
        edges = [mean + s for mean, s in zip(means, off, strict=True)]
        edges += [mean - s for mean, s in zip(means, off, strict=True)][::-1]
        shade = {"fill": "toself", "opacity": 0.2, "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
        yield common | shade | {"x": [*steps, *steps[::-1]], "y": [round(squeezed(edge), 4) for edge in edges]}
    yield common | {
        "x": steps,
        "y": [round(squeezed(mean), 4) for mean in means],
        "text": [f"{mean:+.5f}" for mean in means],
        "hovertemplate": f"{name} %{{text}} at %{{x}}<extra></extra>",
        "line": {"width": THICK[0]},
    }


def _count(runs: Sequence[Run]) -> str:
    """What a run's losses are counted by: steps, or the order in which a process printed them."""
    return "number of the printed loss" if is_printed(runs) else "step"


def loss_curves(runs: Sequence[Run]) -> Figure:
    """The losses of the first seed."""
    first = [run for run in runs if run.seed == runs[0].seed]
    traces = [_curve(run, colour) for run, colour in zip(first, colours(first), strict=True)]
    traces.sort(key=lambda trace: -trace["line"]["width"])
    return {
        "data": traces,
        "layout": {
            "hovermode": "x unified",
            "xaxis": {"title": {"text": _count(runs)}},
            "yaxis": {"title": {"text": "loss"}},
            "height": 380,
        },
    }


def _curve(run: Run, colour: str) -> dict[str, Any]:
    size = -(-len(run.losses) // POINTS)
    pieces = [run.losses[k : k + size] for k in range(0, len(run.losses), size)]
    return {
        "type": "scatter",
        "mode": "lines",
        "name": run.strategy,
        "x": [1 + k * size for k in range(len(pieces))],
        "y": [round(mean, 5) if math.isfinite(mean := fmean(piece)) else None for piece in pieces],
        "line": {"width": THIN if run.strategy in (*BASELINES, UNCOMPILED) else THICK[1]},
        "meta": colour,
    }
