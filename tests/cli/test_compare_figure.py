"""The figure of `compare`: what it draws, and that its names can be read."""

from __future__ import annotations

import math
import re

import pytest

from collage_neuron.cli.charts import squeezed
from collage_neuron.cli.compare_figure import differences, figure_page, loss_curves, loss_over_memory
from collage_neuron.cli.compare_table import UNCOMPILED, Run, cells


def test_the_figure_shows_every_strategy_and_leaves_out_what_is_not_finite() -> None:
    runs = [Run("light", s, 10, [2.0, 1.5 + s]) for s in (0, 1)] + [Run("bf16", s, 8, [2.0, math.nan]) for s in (0, 1)]
    runs += [Run(UNCOMPILED, s, math.nan, [2.0, 1.75]) for s in (0, 1)]
    points = loss_over_memory(runs)
    assert points is not None
    assert [(p["x"], p["y"], p["error_y"]["array"]) for p in points["data"]] == [([10], [2.0], [0.5**0.5])]
    curves = {trace["name"]: (trace["x"], trace["y"]) for trace in loss_curves(runs)["data"]}
    assert curves == {"light": ([1, 2], [2.0, 1.5]), "bf16": ([1, 2], [2.0, None]), UNCOMPILED: ([1, 2], [2.0, 1.75])}


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


def test_the_page_has_the_table_of_the_terminal() -> None:
    pytest.importorskip("plotly")
    runs = [Run(name, 0, size, [2.0, 1.5 + size / 100], [0.1]) for name, size in (("bf16", 8), ("fp32", 16))]
    page = figure_page(runs, "Strategies compared: <mine>", ["What to take."])
    head, rows = cells(runs)
    table = page[page.index("<table>") : page.index("</table>")]
    assert re.findall("<th>(.*?)</th>", table) == head
    assert [re.findall(r"<td.*?>(?:<i.*?></i>)?(.*?)</td>", row) for row in table.split("<tr>")[2:]] == rows
    assert "Strategies compared: &lt;mine&gt;" in page
