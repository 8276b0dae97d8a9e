"""What is said about operands that lose much: in `explain`, in a monitor's log, and in the conclusion of a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fp8_models import compiled, forward, loss_of, small_gpt, tokens

import collage_neuron
from collage_neuron import JsonLog
from collage_neuron.cli.charts import CHARTS
from collage_neuron.cli.report import verdicts
from collage_neuron.matmuls.advice import advice
from collage_neuron.monitoring.run_log import read_log


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((-7.0, 0.0, 0.18), "18% of layers.3.up.gradient become 0: its scale was off by 7 binades; measure more often"),
        ((4.0, 0.3, 0.1), "30% of layers.3.up.gradient saturate: its scale was off by 4 binades"),
        ((1.0, 0.0, 0.06), "6% of layers.3.up.gradient become 0 though its scale fits: .*'layers.3.up' in keep"),
        ((9.0, 0.04, 0.04), None),
    ],
)
def test_an_operand_that_loses_much(numbers: tuple[float, float, float], said: str | None) -> None:
    import re

    found = advice("layers.3.up.gradient", *numbers)
    assert (found is None) == (said is None)
    assert said is None or re.match(said, found or "")


def test_a_monitor_logs_operands_and_the_report_says_what_to_do(tmp_path: Path) -> None:
    model = compiled(small_gpt(), rescale=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = collage_neuron.compile(optimizer, verbose=False)
    path = tmp_path / "run.jsonl"
    with collage_neuron.monitor(optimizer, model, to=JsonLog(path)):
        for i in range(8):
            if i == 6:
                model.get_parameter("layers.0.think.3.weight").data.mul_(2.0**12)
            loss_of(model, tokens(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {line["step"]: line.get("fp8") for line in lines if "step" in line}
    assert [step for step, operands in steps.items() if operands] == [1, 2, 3, 5, 8]
    found = steps[8]
    assert found is not None
    assert found.keys() == forward(model).backend.scales.places.keys()
    assert found["layers.0.think.3.weight"]["saturated"] > 0.5
    text = "\n".join(verdicts([read_log(path, "run")]))
    assert "of layers.0.think.3.weight saturate: its scale was off by 12 binades; measure more often" in text
    assert "saturate: its scale was off" in collage_neuron.explain(model)
    (chart,) = (c for c in CHARTS if "fp8" in c.title)
    assert chart.dashed is not None
    assert chart.dashed({"fp8": found}) > 50
    assert chart.value({"fp8": found}) >= 0
