"""The figure of `compare`: what it draws, and that its names can be read."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from collage_neuron.cli import compare
from collage_neuron.cli.charts import LINEAR, squeezed
from collage_neuron.cli.compare_figure import differences, figure_page, loss_curves, loss_over_memory
from collage_neuron.cli.compare_table import UNCOMPILED, Run, cells
from collage_neuron.cli.name_places import PLOT, POSITIONS, box, positions, shared
from collage_neuron.numerics.strategies import bytes_with_adam


def test_the_figure_shows_every_strategy_and_leaves_out_what_is_not_finite() -> None:
    runs = [Run("light", s, 10, [2.0, 1.5 + s]) for s in (0, 1)] + [Run("bf16", s, 8, [2.0, math.nan]) for s in (0, 1)]
    runs += [Run(UNCOMPILED, s, math.nan, [2.0, 1.75]) for s in (0, 1)]
    points = loss_over_memory(runs)
    assert points is not None
    assert [(p["x"], p["y"], p["error_y"]["array"]) for p in points["data"]] == [([10], [2.0], [0.5**0.5])]
    curves = {trace["name"]: (trace["x"], trace["y"]) for trace in loss_curves(runs)["data"]}
    assert curves == {"light": ([1, 2], [2.0, 1.5]), "bf16": ([1, 2], [2.0, None]), UNCOMPILED: ([1, 2], [2.0, 1.75])}


@pytest.mark.parametrize("apart", [0.0, 0.001, 0.02])
def test_names_of_strategies_of_as_many_bytes_do_not_cover_each_other(apart: float) -> None:
    """On a telephone, where names are nearest; and no mark hides another of the same bytes and loss."""
    sizes = {name: bytes_with_adam(name) for name in compare.DEFAULT}
    runs = [
        Run(name, 0, size, [2.6 if name == "bf16" else 2.1 + apart * i]) for i, (name, size) in enumerate(sizes.items())
    ]
    figure = loss_over_memory(runs)
    assert figure is not None
    data, axes = figure["data"], [figure["layout"][k]["range"] for k in ("xaxis", "yaxis")]
    at = [
        [(p[k][0] - low) / (high - low) * size for k, (low, high), size in zip("xy", axes, PLOT, strict=True)]
        for p in data
    ]
    boxes = [box(p["name"], (x, y), POSITIONS[p["textposition"]]) for p, (x, y) in zip(data, at, strict=True)]
    assert all(shared(a, b) == 0 for a, b in combinations(boxes, 2))
    assert all(b[0] >= 0 and b[1] >= 0 and b[2] <= PLOT[0] and b[3] <= PLOT[1] for b in boxes)
    by_name = {p["name"]: p["marker"]["size"] for p in data}
    assert by_name["plus"] > by_name["split433"]


def test_a_name_lies_beside_the_bar_of_its_point() -> None:
    names, points, ranges = ["bf16", "plus"], [(8.0, 2.0), (12.0, 2.0)], ((6.0, 14.0), (1.0, 3.0))
    assert positions(names, points, ranges) == ["top center"] * 2
    assert positions(names, points, ranges, [0.5, 0.0]) == ["middle right", "top center"]


def test_losses_are_shown_above_those_of_fp32_with_the_spread_of_the_seeds() -> None:
    runs = [Run("plus", s, 12, [2.0, 1.5 + 0.1 * s + 0.01]) for s in (0, 1)]
    runs += [Run("fp32", s, 16, [2.0, 1.5 + 0.1 * s - 0.002 * s]) for s in (0, 1)]
    shade, mean = differences(runs)["data"]
    assert (shade["fill"], mean["name"], mean["x"]) == ("toself", "plus", [1, 2])
    assert mean["text"] == ["+0.00000", "+0.01100"]
    assert mean["y"] == pytest.approx([0.0, squeezed(0.011)], abs=1e-3)
    spread = 0.002 / 2**0.5  # of .010 and .012
    assert shade["y"][1] == pytest.approx(squeezed(0.011 + spread), abs=1e-3)
    assert shade["y"][2] == pytest.approx(squeezed(0.011 - spread), abs=1e-3)
    memory = loss_over_memory(runs)
    assert memory is not None
    assert [(p["name"], p["y"][0]) for p in memory["data"]] == [("plus", pytest.approx(0.011)), ("fp32", 0)]


def test_the_axis_of_differences_is_linear_near_zero_and_has_a_sign() -> None:
    found = [squeezed(x * LINEAR) for x in (-10, -1, -0.5, 0, 0.5, 1, 10, 100)]
    assert found == pytest.approx([-2, -1, -0.5, 0, 0.5, 1, 2, 3])


def test_the_page_has_the_table_of_the_terminal() -> None:
    pytest.importorskip("plotly")
    runs = [Run(name, 0, size, [2.0, 1.5 + size / 100], [0.1]) for name, size in (("bf16", 8), ("fp32", 16))]
    page = figure_page(runs, "Strategies compared: <mine>", ["What to take."])
    head, rows = cells(runs)
    table = page[page.index("<table>") : page.index("</table>")]
    assert re.findall("<th>(.*?)</th>", table) == head
    assert [re.findall(r"<td.*?>(?:<i.*?></i>)?(.*?)</td>", row) for row in table.split("<tr>")[2:]] == rows
    assert "Strategies compared: &lt;mine&gt;" in page
