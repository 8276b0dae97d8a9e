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

from accuracy.table import Row

SHOWN = {"recipe": "recipe", "t2": "Student-t gradients", "1e-6": "learning rate 1e-6"}
SPLIT, PEER = "#0072B2", "#999999"
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
        for axes, (condition, title) in zip(panels, SHOWN.items(), strict=True):
            _panel(axes, [row for row in found if condition in row.errors], condition)
            axes.set(title=title, xlabel="bytes per parameter: weights and states", yscale="log")
        panels[0].set_ylabel("error / distance travelled")
        return _text(picture)


def draw_recipe(found: Sequence[Row]) -> str:
    """The first panel alone, large enough to be read beside text."""
    with plt.rc_context(SETTINGS | {"font.size": 10}):
        picture, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        _panel(axes, [row for row in found if "recipe" in row.errors], "recipe", 8)
        axes.set(xlabel="bytes per parameter: weights and states", ylabel="error / distance travelled", yscale="log")
        axes.set_xlim(3.7, 15.6)  # for the names at the right
        return _text(picture)


def _text(picture: Figure) -> str:
    text = StringIO()
    picture.savefig(text, format="svg", metadata={"Date": None})
    plt.close(picture)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _panel(axes: Axes, rows: Sequence[Row], condition: str, size: int = 6) -> None:
    for row in rows:
        error = row.mean(condition)
        if not math.isfinite(error):
            continue
        mark, colour = _style(row)
        axes.plot(row.bytes, error, mark, color=colour, markersize=5)
        axes.annotate(
            row.name, (row.bytes, error), xytext=(4, 2), textcoords="offset points", fontsize=size, color=colour
        )
    front = _front([row for row in rows if row.own], condition)
    axes.plot([r.bytes for r in front], [r.mean(condition) for r in front], color=SPLIT, linewidth=0.8, zorder=0)


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
