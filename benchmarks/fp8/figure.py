"""The figure: by how much each way's loss is above bf16's, seed by seed, beside the range of bf16's seeds."""

from __future__ import annotations

from collections.abc import Sequence

from accuracy.figure import svg
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from study.figures import SETTINGS
from study.jobs import Record

from fp8.readings import PARTS, Part, above, chosen, losses, spread

COLOURS = {
    "amax": "#999999",
    "propagated": "#0072B2",
    "offsets": "#009E73",
    "unscaled": "#D55E00",
    "frozen": "#CC79A7",
}


def draw(records: Sequence[Record]) -> str:
    """The figure as SVG text; equal records give equal text."""
    shown = [part for part in PARTS if any(part.has(r) for r in records)]
    with plt.rc_context(SETTINGS | {"svg.hashsalt": "fp8"}):
        picture, panels = plt.subplots(
            1, len(shown), figsize=(3.6 * len(shown), 3.6), layout="constrained", squeeze=False
        )
        for axes, part in zip(panels[0], shown, strict=True):
            _panel(axes, part, records)
        panels[0][0].set_ylabel("validation loss above bf16's of the same seed")
        handles = [Line2D([], [], color=c, marker="o", linestyle="", label=way) for way, c in COLOURS.items()]
        picture.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        return svg(picture)


def _panel(axes: Axes, part: Part, records: Sequence[Record]) -> None:
    values = sorted({part.value(r) for r in records if part.has(r)})
    for i, value in enumerate(values):
        found = chosen(part, records, value)
        if len(losses(found, "bf16")) > 1:  # of one seed there is no range
            axes.fill_between(
                [i - 0.4, i + 0.4], -spread(found), spread(found), color="#999999", alpha=0.2, linewidth=0
            )
        for j, (way, colour) in enumerate(COLOURS.items()):
            apart = list(above(found, way).values())
            axes.plot([i + (j - 2) * 0.14] * len(apart), apart, "o", color=colour, markersize=3.5, alpha=0.8)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set(title=part.title.partition(",")[0].partition(":")[0], xlabel=part.column)
