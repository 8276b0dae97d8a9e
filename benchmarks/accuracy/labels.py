"""Places the names of points in a figure where they cover neither each other nor the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

Boxes = NDArray[np.float64]

AROUND = [(math.cos(k * math.pi / 8), math.sin(k * math.pi / 8)) for k in range(16)]
DISTANCES = (6, 10, 15, 21, 28, 36)
"""Points (1/72 inch) between a mark and the nearest edge of its name."""
FAR = 12
"""From this distance on a thin line leads from the name to its mark."""
MARK = 4
"""Half the width of a mark, in points."""
WIDTH = 1.5
"""Half the width of what a line keeps free, in points."""
STEPS = 24
SWEEPS = 4


@dataclass(frozen=True)
class Name:
    """A text that belongs to a point of the data."""

    text: str
    at: tuple[float, float]
    colour: str
    size: float


def place(axes: Axes, names: Sequence[Name], line: Sequence[tuple[float, float]] = ()) -> Boxes:
    """Writes the names into the axes, whose layout and limits are final; returns their boxes, [n, 4], in pixels.

    Each name takes the place that costs least: area that it would cover of marks, of a line through points of the data,
    of other names and outside the axes, and then distance; equal names give equal places. Later sweeps let each name
    move once more, now that the others have a place.
    """
    pixel = axes.figure.dpi / 72  # pixels of a point
    centres = [axes.transData.transform(name.at) for name in names]
    marks = np.concatenate([_around(centres, MARK * pixel), _around(_along(axes, line), WIDTH * pixel)])
    places = [_places(at, _size(axes, name), pixel) for at, name in zip(centres, names, strict=True)]
    inside = np.array([axes.bbox.extents])
    taken: dict[int, int] = {}
    for _, i in product(range(SWEEPS), range(len(names))):
        others = np.array([places[j][k] for j, k in taken.items() if j != i]).reshape(-1, 4)
        sizes = _shared(places[i], places[i]).diagonal()
        outside = sizes - _shared(places[i], inside)[:, 0]
        covered = _shared(places[i], np.concatenate([others, marks])).sum(1)
        taken[i] = int(np.argmin((covered + 10 * outside).round(3) + 0.2 * np.repeat(DISTANCES, len(AROUND))))
    for i, name in enumerate(names):
        _write(axes, name, places[i][taken[i]], DISTANCES[taken[i] // len(AROUND)] > FAR)
    return np.array([places[i][taken[i]] for i in range(len(names))])


def _around(centres: Sequence[Boxes], half: float) -> Boxes:
    return np.array([[x - half, y - half, x + half, y + half] for x, y in centres]).reshape(-1, 4)


def _along(axes: Axes, line: Sequence[tuple[float, float]]) -> list[Boxes]:
    """Points on a line, so many to a segment that what lies across it covers some."""
    ends = [axes.transData.transform(point) for point in line]
    return [a + (b - a) * k / STEPS for a, b in pairwise(ends) for k in range(STEPS)]


def _size(axes: Axes, name: Name) -> tuple[float, float]:
    """Width and height of the text in pixels."""
    drawn = axes.text(0, 0, name.text, fontsize=name.size)
    extent = drawn.get_window_extent()
    drawn.remove()
    return extent.width, extent.height


def _places(mark: Boxes, size: tuple[float, float], pixel: float) -> Boxes:
    """Where a text of the size may lie beside a mark, [distances x directions, 4]: left, bottom, right, top."""
    found = []
    for distance, to in product(DISTANCES, AROUND):
        x, y = (mark[k] + distance * pixel * to[k] + size[k] / 2 * _side(to[k]) for k in (0, 1))
        found.append([x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2])
    return np.array(found)


def _side(x: float) -> float:
    """-1, 0 or 1: whether a text lies before, over or after its mark in one direction."""
    return 0 if abs(x) < 0.3 else math.copysign(1, x)


def _shared(a: Boxes, b: Boxes) -> Boxes:
    """The area that each of [n, 4] boxes shares with each of [m, 4] boxes, in pixels squared: [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    area: Boxes = np.clip(high - low, 0, None).prod(2)
    return area


def _write(axes: Axes, name: Name, box: Boxes, leads: bool) -> None:
    x, y = axes.transAxes.inverted().transform((box[:2] + box[2:]) / 2)
    line = {"arrowstyle": "-", "color": name.colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3}
    axes.annotate(
        name.text,
        name.at,
        xytext=(float(x), float(y)),
        textcoords="axes fraction",
        fontsize=name.size,
        color=name.colour,
        ha="center",
        va="center",
        arrowprops=line if leads else None,
    )
