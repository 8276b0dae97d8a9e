"""Places the names of points in a chart so that they cover neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""

PLOT = 280.0, 270.0
"""Width and height of the plot on a telephone, in pixels: in wider windows names are further apart."""
LETTER, LINE, GAP, MARK, BAR = 6.0, 13.0, 8.0, 5.0, 3.0
"""Mean width of a letter and height of a line, distance of a name from its point, half a mark and half the width of a
bar, in pixels."""
SPACE = 0.16, 0.12
"""The room beside the points, as a share of their range: names are written there too."""

POSITIONS = {
    "top center": (0, 1),
    "bottom center": (0, -1),
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top right": (1, 1),
    "bottom right": (1, -1),
    "top left": (-1, 1),
    "bottom left": (-1, -1),
}
"""plotly's names for where a text may lie beside its point, the preferred ones first."""


def axis_range(values: Sequence[float], space: float) -> tuple[float, float]:
    """The range of an axis with room for names at both ends; equal values are given some range, too."""
    low, high = min(values), max(values)
    room = space * ((high - low) or abs(high) or 1.0)
    return low - room, high + room


def positions(
    names: Sequence[str], points: Sequence[Point], ranges: tuple[Point, Point], bars: Sequence[float] = ()
) -> list[str]:
    """A position of POSITIONS for each name: the one that covers least of marks, bars, names before it, and the edge.

    Points, the ranges of both axes and the bars, which reach as far above a point as below, are in the units of the
    data.
    """
    at = [tuple(_pixels(point, ranges, k) for k in (0, 1)) for point in points]
    taken = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in at]
    lengths = (bar / (ranges[1][1] - ranges[1][0]) * PLOT[1] + GAP / 2 * (bar > 0) for bar in bars)
    taken += [(x - BAR, y - length, x + BAR, y + length) for (x, y), length in zip(at, lengths, strict=False)]
    found = []
    for name, (x, y) in zip(names, at, strict=True):
        boxes = {where: box(name, (x, y), to) for where, to in POSITIONS.items()}
        cost = {where: sum(shared(b, other) for other in taken) + _outside(b) for where, b in boxes.items()}
        found.append(min(cost, key=cost.__getitem__))
        taken.append(boxes[found[-1]])
    return found


def _pixels(point: Point, ranges: tuple[Point, Point], k: int) -> float:
    low, high = ranges[k]
    return (point[k] - low) / (high - low) * PLOT[k]


def box(name: str, at: Point, to: tuple[int, int]) -> Box:
    """The text of a name beside its point, in a direction."""
    width, height = LETTER * len(name), LINE
    # plotly writes beside a mark at the height of its middle, or above, but never far out at a corner.
    x = at[0] + to[0] * (width / 2 + (GAP if to[1] == 0 else MARK))
    y = at[1] + to[1] * (height / 2 + GAP)
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def shared(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(width, 0.0) * max(height, 0.0)


def _outside(name: Box) -> float:
    """The area of a name that lies outside the plot."""
    return (name[2] - name[0]) * (name[3] - name[1]) - shared(name, (0.0, 0.0, *PLOT))
