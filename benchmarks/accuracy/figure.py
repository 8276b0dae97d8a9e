"""The figures: error over bytes, under three conditions, and at the recipe alone, for README.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study.figures import COLOURS

from accuracy.labels import Name, place
from accuracy.table import Row

SHOWN = {"recipe": "recipe", "t2": "Student-t gradients", "1e-6": "learning rate 1e-6"}
SPLIT, PEER = "#0072B2", "#737373"
SETTINGS: Any = {
    "svg.hashsalt": "accuracy",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}


def draw(found: Sequence[Row]) -> str:
    """The figure as SVG text; equal rows give equal text."""
    with plt.rc_context(SETTINGS):
        picture, panels = plt.subplots(1, len(SHOWN), figsize=(12, 4.4), layout="constrained", sharex=True)
        names = []
        for axes, (condition, title) in zip(panels, SHOWN.items(), strict=True):
            names.append(_panel(axes, [row for row in found if condition in row.errors], condition, 6))
            axes.set(title=title, xlabel="bytes per parameter: weights and states", yscale="log")
        panels[0].set_ylabel("error / distance travelled")
        return _text(picture, names)


def draw_recipe(found: Sequence[Row]) -> str:
    """The first panel alone, wide and flat, so that it shares the first screen of README.md with the changed line."""
    with plt.rc_context(SETTINGS | {"font.size": 10}):
        picture, axes = plt.subplots(figsize=(9.6, 3.3), layout="constrained")
        names = _panel(axes, [row for row in found if "recipe" in row.errors], "recipe", 9)
        axes.set(xlabel="bytes per parameter: weights and states", ylabel="error / distance travelled", yscale="log")
        axes.set(xlim=(3.5, 14.7), ylim=(1.2e-6, 12))
        axes.text(0.012, 0.04, "↙ better: fewer bytes, smaller error", transform=axes.transAxes, color=PEER)
        return _text(picture, [names])


def _text(picture: Figure, names: Sequence[Sequence[Name]]) -> str:
    """The figure as SVG text, with the names of each panel's points."""
    picture.canvas.draw()  # the layout is final only now
    picture.set_layout_engine("none")
    for axes, of_panel in zip(picture.axes, names, strict=True):
        place(axes, of_panel)
    text = StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None})
    plt.close(picture)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _panel(axes: Axes, rows: Sequence[Row], condition: str, size: float) -> list[Name]:
    """Draws the points of a condition; returns their names, which are placed when the layout is final."""
    names = []
    for row in rows:
        error = row.mean(condition)
        if not math.isfinite(error):
            continue
        mark, colour = _style(row)
        axes.plot(row.bytes, error, mark, color=colour, markersize=7 if mark == "*" else 5)
        names.append(Name(row.name, (row.bytes, error), colour, size))
    front = _front([row for row in rows if row.own], condition)
    axes.plot([r.bytes for r in front], [r.mean(condition) for r in front], color=SPLIT, linewidth=0.8, zorder=0)
    return names


def _style(row: Row) -> tuple[str, str]:
    if row.own:
        return ("s", COLOURS[row.name]) if row.name in COLOURS and row.name != "fp32" else ("o", SPLIT)
    return ("*", "black") if row.source == "torch" else ("x", PEER)


def _front(rows: Sequence[Row], condition: str) -> list[Row]:
    """The rows that are more accurate than every row with as few bytes, by bytes."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (round(row.bytes), row.mean(condition))):
        if not front or row.mean(condition) < front[-1].mean(condition):
            front.append(row)
    return front
