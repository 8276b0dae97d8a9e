"""What `compare` says of runs: losses as scripts print them, the table and logs, what is chance, what to take."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from collage_neuron.cli.compare import Run, losses_in, recommendation, remarks, table, write_logs
from collage_neuron.monitoring.run_log import read_logs


def test_the_table_has_a_row_a_strategy_and_only_columns_with_numbers() -> None:
    runs = [
        Run(name, s, size, [loss + s], 2.0)
        for name, size, loss in (("bf16", 8, 3.0), ("fp32", 16, 2.5))
        for s in (0, 1)
    ]
    lines = table(runs).splitlines()
    assert lines[0].split() == ["strategy", "bytes/parameter", "loss", "above", "fp32", "whole", "run"]
    assert lines[1].split() == ["bf16", "8.0", "3.5000", "+0.5000", "±", "0.0000", "2.0", "s"]
    assert "above" not in table(runs[:2])


def test_remarks_say_what_is_chance_and_which_strategy_is_enough() -> None:
    one = [Run("light", 0, 10, [2.1]), Run("fp32", 0, 16, [2.1])]
    assert remarks(one)[-1].startswith(
        "One seed cannot tell a difference from chance: `--seeds 0 1 2` gives a recommend"
    )
    assert "fp32 is not among" in recommendation(one[:1])
    light = [Run("light", s, 10, [2.1 + 0.2 * s]) for s in (0, 1)]
    bf16 = [Run("bf16", s, 8, [3.0 + 0.2 * s]) for s in (0, 1)]
    fp32 = [Run("fp32", s, 16, [2.1 + 0.21 * s]) for s in (0, 1)]
    assert "light, 10 bytes" in " ".join(remarks(bf16 + light + fp32).pop().split())


def test_runs_that_do_not_start_alike_are_remarked_on() -> None:
    runs = [Run("plus", 0, 12, [2.1]), Run("fp32", 0, 16, [2.3])]
    assert "do not start alike" in remarks(runs)[0]
    assert "do not start alike" not in remarks(runs[1:])[0]


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
    said = (
        "NaN or Inf: plus with seed 0 in 1 of 2 printed losses, first in 2; plus with seed 1 in 1 of 2 printed losses"
    )
    assert remarks(low + fp32)[0].startswith(said)


def test_a_strategy_that_is_better_than_fp32_is_near_enough() -> None:
    fp32 = [Run("fp32", s, 16, [2.0 + 0.01 * s]) for s in (0, 1)]
    plus = [Run("plus", s, 12, [1.5 + 0.01 * s]) for s in (0, 1)]
    said = recommendation(fp32 + plus)
    assert said.startswith("recommendation: plus, 12 bytes per parameter; its loss minus that of fp32 from the same")
    assert said.endswith("seed is -0.5000 ± 0.0000 (mean and standard deviation of 2 seeds)")


def test_what_seeds_differ_by_does_not_hide_what_a_strategy_loses() -> None:
    """Seeds differ by .1, and bf16 from fp32 by .04 from each: it was recommended."""
    fp32 = [Run("fp32", s, 16, [6.0, 2.7 + 0.1 * s]) for s in range(3)]
    bf16 = [Run("bf16", s, 8, [6.0, 2.74 + 0.101 * s]) for s in range(3)]
    split = [Run("split312", s, 8.2, [6.0, 2.7 + 0.1 * s + 0.001 * (-1) ** s]) for s in range(3)]
    said = recommendation(bf16 + split + fp32)
    assert said.startswith("recommendation: split312, 8.2 bytes")
    assert said.endswith("; bf16 (+0.0410 ± 0.0010) needs less and loses more")


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


def test_a_log_for_each_strategy_has_the_mean_loss_of_its_seeds(tmp_path: Path) -> None:
    write_logs([Run(name, s, 8, [2.0, 1.5 + s]) for name in ("light", "bf16") for s in (0, 1)], tmp_path)
    logs = {log.name: log for log in read_logs([tmp_path])}
    assert logs.keys() == {"light", "bf16"}
    assert logs["light"].about == {"strategy": "light", "bytes_per_parameter": 8}
    assert logs["light"].series(lambda record: record["loss"]) == ([1, 2], [2.0, 2.0])
