"""What `compare` says of runs: losses as scripts print them, the table and page, what is chance, what to take."""

from __future__ import annotations

import math

import pytest

from collage_neuron.cli.charts import above_fp32, squeezed
from collage_neuron.cli.compare_results import (
    UNCOMPILED,
    Run,
    as_log,
    loss_over_memory,
    recommendation,
    remarks,
    table,
)
from collage_neuron.cli.user_script import losses_in


def test_the_table_has_a_row_a_strategy_and_only_columns_with_numbers() -> None:
    runs = [Run("bf16", s, 8, [3.0 + s], [0.25]) for s in (0, 1)] + [
        Run("fp32", s, 16, [2.5 + s], [0.5]) for s in (0, 1)
    ]
    lines = table(runs).splitlines()
    assert lines[0].split() == ["strategy", "bytes/parameter", "loss", "above", "fp32", "step"]
    assert lines[1].split() == ["bf16", "8.0", "3.5000", "+0.5000", "±", "0.0000", "250.0", "ms"]
    assert "above" not in table(runs[:2])


def test_remarks_say_what_is_chance_and_which_strategy_is_enough() -> None:
    one = [Run("light", 0, 10, [2.1]), Run("fp32", 0, 16, [2.1])]
    (said,) = remarks(one)
    again = "`collage_neuron compare --seeds 0 1 2` (about a minute)"
    assert said == f"One seed cannot tell a difference from chance: {again} gives a recommendation."
    assert "`x t.py --seeds 0 1 2 -- --seed {seed}` gives" in recommendation(one, "x t.py -- --seed {seed}")
    assert "fp32 is not among" in recommendation(one[:1])
    light = [Run("light", s, 10, [2.1 + 0.2 * s]) for s in (0, 1)]
    bf16 = [Run("bf16", s, 8, [3.0 + 0.2 * s]) for s in (0, 1)]
    fp32 = [Run("fp32", s, 16, [2.1 + 0.21 * s]) for s in (0, 1)]
    assert "light, 10 bytes" in " ".join(remarks(bf16 + light + fp32).pop().split())


def test_a_loss_that_is_not_a_number_is_never_recommended() -> None:
    fp32 = [Run("fp32", s, 16, [2.0 + 0.1 * s]) for s in (0, 1)]
    bf16 = [Run("bf16", s, 8, [math.nan]) for s in (0, 1)]
    assert "recommendation: fp32, 16 bytes" in recommendation(bf16 + fp32)
    assert "bf16 (+nan ± nan) needs less and loses more" in recommendation(bf16 + fp32)
    assert recommendation([Run("fp32", s, 16, [math.nan]) for s in (0, 1)]).endswith("fp32 is not finite")
    assert "nan" in table(bf16 + fp32)
    low = [Run("plus", s, 12, [2.0, -math.inf]) for s in (0, 1)]
    assert "recommendation: fp32, 16 bytes" in recommendation(low + fp32)
    began = [Run("fp32", s, 16, [math.inf, 2.0 + s]) for s in (0, 1)]
    assert recommendation(bf16 + began).endswith("fp32 is not finite")
    said = "NaN or Inf: plus with seed 0 in 1 of 2 steps, first in 2; plus with seed 1 in 1 of 2 steps"
    assert remarks(low + fp32)[0].startswith(said)


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("iter 10: loss 2.5, time 3.1ms\niter 20: loss 2.25, time 3ms", [2.5, 2.25]),
        ("step 0: train loss 4.2, val loss 4.25\niter 1: loss 3.0", [4.25]),
        ("{'loss': 2.5, 'epoch': 1}\n{'train_runtime': 3.0, 'train_loss': 9.0}", [2.5]),
        ("10%|# | 1/10 [00:01, loss=2.5]\r20%|## | 2/10 [00:02, loss=-1e-2]", [2.5, -0.01]),
        ("Epoch 0: train_loss=0.75, v_num=0", [0.75]),
        ("loss scale 1024, no-loss 3, losses 4", []),
        ("Loss: inf\nLoss: 3", [math.inf, 3.0]),
        ("loss    10.2500\nloss     9.5000", [10.25, 9.5]),
        ("loss: 1,234.5, loss: .25", [1234.5, 0.25]),
        ("loss\n7", []),
    ],
)
def test_losses_are_read_as_scripts_print_them(text: str, losses: list[float]) -> None:
    assert losses_in(text) == losses


def test_the_figure_shows_every_strategy_and_leaves_out_what_is_not_finite() -> None:
    runs = [Run("light", s, 10, [2.0, 1.5 + s]) for s in (0, 1)] + [Run("bf16", s, 8, [2.0, math.nan]) for s in (0, 1)]
    runs += [Run(UNCOMPILED, s, math.nan, [2.0, 1.75]) for s in (0, 1)]
    runs += [Run("plus", s, 12, [2.0, 1.5 / s if s else math.nan]) for s in (0, 1)]
    points = loss_over_memory(runs)
    assert points is not None
    assert [(p["x"], p["y"], p["error_y"]["array"]) for p in points["data"]] == [([10], [2.0], [0.5**0.5])]
    curves = {log.name: log.series(lambda record: record["loss"]) for log in map(as_log, runs[:6:2])}
    assert curves == {"light": ([1, 2], [2.0, 1.5]), "bf16": ([1], [2.0]), UNCOMPILED: ([1, 2], [2.0, 1.75])}
    long = as_log(Run("plus", 0, 12, [2.0] * 799 + [1.0]))
    assert (long.steps, long.records[-1]["loss"]) == ([*range(1, 801, 2)], 1.5)


def test_losses_are_shown_above_those_of_fp32_with_the_spread_of_the_seeds() -> None:
    runs = [Run("plus", s, 12, [2.0, 1.5 + 0.1 * s + 0.01]) for s in (0, 1)]
    runs += [Run("fp32", s, 16, [2.0, 1.5 + 0.1 * s - 0.002 * s]) for s in (0, 1)]
    drawn = above_fp32(list(map(as_log, runs)))
    assert drawn is not None
    shade, mean = drawn["data"]
    assert (shade["fill"], mean["name"], mean["x"]) == ("toself", "plus", [1, 2])
    assert mean["text"] == ["+0.00000", "+0.01100"]
    assert mean["y"] == pytest.approx([0.0, squeezed(0.011)], abs=1e-3)
    spread = 0.002 / 2**0.5  # of .010 and .012
    assert shade["y"][1] == pytest.approx(squeezed(0.011 + spread), abs=1e-3)
    assert shade["y"][2] == pytest.approx(squeezed(0.011 - spread), abs=1e-3)
    memory = loss_over_memory(runs)
    assert memory is not None
    assert [(p["name"], p["y"][0]) for p in memory["data"]] == [("plus", pytest.approx(0.011)), ("fp32", 0)]
