"""The figures: error over bytes, under three conditions, and at the recipe alone, for README.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import StringIO

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study.figures import SETTINGS

from accuracy.labels import Name, place
from accuracy.table import Row
from collage_neuron.cli import palette

SHOWN = {"recipe": "recipe", "t2": "Student-t gradients", "1e-6": "learning rate 1e-6"}
BEST = {
    "split311", "split312", "split322", "split323", "split423", "split433", "split444", "plus", "bf16", "torch fp32",
    "torchao 8-bit SR", "FlashAdamW 8-bit", "torchao SR", "FlashAdamW bf16", "optimi Kahan", "heavyball ECC bf16+8",
    "heavyball ECC bf16+16",
}  # fmt: skip
"""The points of README.md's figure: the best of each size, ours and of other packages, the paper's, and pure bf16."""

Point = tuple[float, float]
SPLIT, PEER = palette.COLOURS["split433"], "#737373"
SALT = {"svg.hashsalt": "accuracy"}


def draw(found: Sequence[Row]) -> str:
    """The figure as SVG text; equal rows give equal text."""
    with plt.rc_context(SETTINGS | SALT):
        picture, panels = plt.subplots(1, len(SHOWN), figsize=(12, 4.4), layout="constrained", sharex=True)
        names = []
        for axes, (condition, title) in zip(panels, SHOWN.items(), strict=True):
            names.append(_panel(axes, [row for row in found if condition in row.errors], condition, 6))
            axes.set(title=title, xlabel="bytes per parameter: weight, gradient, states", yscale="log")
        panels[0].set_ylabel("error / distance travelled")
        return _text(picture, names)


def draw_recipe(found: Sequence[Row]) -> str:
    """The first panel alone, for README.md: so few points and pixels that its names can be read on a telephone."""
    rows = [row for row in found if "recipe" in row.errors and row.name in BEST]
    with plt.rc_context(SETTINGS | SALT | {"font.size": 11}):
        picture, axes = plt.subplots(figsize=(5.8, 3.8), layout="constrained")
        names = _panel(axes, rows, "recipe", 11)
        axes.set(
            xlabel="bytes per parameter: weight, gradient, states", ylabel="error / distance travelled", yscale="log"
        )
        axes.set(xlim=(5.4, 16.6), ylim=(1.2e-6, 12))
        axes.text(0.015, 0.03, "↙ better", transform=axes.transAxes, color=PEER)
        return _text(picture, [names], _line(_front([row for row in rows if row.own], "recipe"), "recipe"))


def _text(picture: Figure, names: Sequence[Sequence[Name]], line: Sequence[Point] = ()) -> str:
    """The figure as SVG text, with the names of each panel's points; they do not lie on the line."""
    picture.canvas.draw()  # the layout is final only now
    picture.set_layout_engine("none")
    for axes, of_panel in zip(picture.axes, names, strict=True):
        place(axes, of_panel, line)
    return svg(picture)


def svg(picture: Figure) -> str:
    """A figure as SVG text; it is closed."""
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
    axes.plot(*zip(*_line(front, condition), strict=True), color=SPLIT, linewidth=0.8, zorder=0)
    return names


def _line(front: Sequence[Row], condition: str) -> list[Point]:
    return [(row.bytes, row.mean(condition)) for row in front]


def _style(row: Row) -> tuple[str, str]:
    if row.own:
        is_split = row.name.startswith("split") and row.name != "split433"
        return ("o", SPLIT) if is_split or row.name not in palette.COLOURS else ("s", palette.COLOURS[row.name])
    return ("*", "black") if row.name == "torch fp32" else ("x", PEER)


def _front(rows: Sequence[Row], condition: str) -> list[Row]:
    """The rows that are more accurate than every row with as few bytes, by bytes."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (round(row.bytes), row.mean(condition))):
        if not front or row.mean(condition) < front[-1].mean(condition):
            front.append(row)
    return front
