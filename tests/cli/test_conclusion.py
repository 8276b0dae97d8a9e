"""What a report concludes: its title, the runs' losses beside fp32's, and how much of the updates arrived."""

from __future__ import annotations

from typing import Any

from run_logs import Write, line

from collage_neuron.cli.report import LATE, conclusion, title, verdicts
from collage_neuron.monitoring.metrics import ADVICE
from collage_neuron.monitoring.run_log import read_log


def runs(write: Write, *abouts: dict[str, Any], steps: int = 2) -> list[Any]:
    return [
        read_log(write(f"{i}.jsonl", about, *(line(s, 1 / (i + 1)) for s in range(1, steps + 1))), about["strategy"])
        for i, about in enumerate(abouts)
    ]


def test_the_title_says_model_optimizer_and_date(write: Write) -> None:
    about = {"model": "GPT", "optimizer": "AdamW", "strategy": "plus", "date": "2026-11-22"}
    assert title(runs(write, about)) == "GPT, AdamW, 22 November 2026: plus"
    later = about | {"strategy": "bf16", "date": "2026-12-01"}
    assert title(runs(write, later, about)) == "GPT, AdamW, 22 November 2026 to 1 December 2026: bf16, plus"
    assert title(runs(write, {"strategy": "plus"})) == "plus"


def test_the_conclusion_judges_by_fp32_and_names_what_is_lost(write: Write) -> None:
    control, ours, plain = ({"strategy": name, "bytes_per_parameter": size, "seed": 0} for name, size in
                            (("fp32", 16.0), ("plus", 12.0), ("bf16", 8.0)))  # fmt: skip
    logs = runs(write, control, ours, plain)
    logs[2].records[-1]["loss"] = 1.75
    logs[1].records[-1]["loss"] = 1.4
    assert conclusion(logs) == (
        "plus (12 bytes per parameter) ends nearest to fp32 (16 bytes per parameter), 0.1000 below its loss of 1.5000 "
        "at step 2; bf16 (8 bytes per parameter) 0.2500 above. These are runs of one seed: small differences may be "
        "chance. Under bf16, 66.7 % of the updates changed nothing; under plus, 50 %."
    )


def test_it_says_when_updates_were_lost_because_the_rate_was_almost_zero(write: Write) -> None:
    (log,) = runs(write, {"strategy": "plus"}, steps=10)
    for record in log.records:
        record["total"]["pair"]["lost"] = 0.01 if record["step"] < 9 else 40.0
        record["total"]["raw_norm"] = 1.0 if record["step"] < 9 else 0.01
    assert conclusion([log]).endswith(f"plus {LATE}.")
    for record in log.records:
        record["total"]["raw_norm"] = 1.0  # lost late, while the rate was as before: that is another reason
    assert "last fifth" not in conclusion([log])
    for record in log.records:
        record["total"] |= {"raw_norm": 1.0 / record["step"] ** 3, "pair": record["total"]["pair"] | {"lost": 5.0}}
    assert "last fifth" not in conclusion([log])  # lost all along


def test_a_verdict_for_each_run_in_the_order_given(write: Write) -> None:
    names = ("plus", "bf16", "fp32", "late", "bare", "nans", "skip")
    logs = [
        read_log(write(f"{name}.jsonl", {"strategy": name}, *(line(s, 1.0) for s in range(1, 11))), f"run {name}")
        for name in names
    ]
    for record in (*logs[1].records, *logs[2].records):
        record["total"]["pair"] |= {"ratio": 0.5, "lost": 50.0}
    for record in logs[3].records:
        record["total"]["pair"]["lost"] = 0.01 if record["step"] < 9 else 40.0
        record["total"]["raw_norm"] = 1.0 if record["step"] < 9 else 0.01
    for record in logs[4].records:
        del record["total"]
    for record in logs[5].records[6:]:
        record["loss"] = None
    logs[6].records[2]["total"]["raw_norm"] = None
    late = "nothing to mend: updates were lost at the end, where they are almost 0"
    more = "a strategy with more bytes per parameter keeps more (docs/strategies.md)"
    assert verdicts(logs) == [
        "run plus  plus  EDQ 1.0000  lost 0.00 %: nothing to mend",
        f"run bf16  bf16  EDQ 0.5000  lost 50.00 %: updates are lost: {more}",
        "run fp32  fp32  EDQ 0.5000  lost 50.00 %: fp32 loses them too: the updates are small beside the weights",
        f"run late  late  EDQ 1.0000  lost 8.01 %: {late}",
        "run bare  bare: what arrives of its updates was not measured",
        f"run nans  nans  EDQ 1.0000  lost 0.00 %   NaN or Inf in 4 of 10 measured steps, first in 7: {ADVICE}",
        "run skip  skip  EDQ 1.0000  lost 0.00 %   NaN or Inf in 1 of 10 measured steps, first in 3: nothing to mend",
    ]


def test_the_conclusion_compares_no_losses_that_cannot_be_compared(write: Write) -> None:
    seeds = runs(write, {"strategy": "fp32", "seed": 0}, {"strategy": "plus", "seed": 1})
    assert conclusion(seeds).startswith("The runs end at different steps or have different seeds, so")
    (short,) = runs(write, {"strategy": "fp32", "seed": 1}, steps=1)
    assert conclusion([short, seeds[1]]).startswith("The runs end at different steps or have different seeds, so")
    no_control = runs(write, {"strategy": "bf16"}, {"strategy": "plus"})
    assert "there is no run of fp32 to judge them by" in conclusion(no_control)
    assert conclusion(no_control[:1]) == (
        "bf16 has a loss of 1.5000 at step 2. 0 % of its updates changed nothing (EDQ 1.0000; 1 is all of it)."
    )
    for record, key in ((no_control[0].records[-1], "loss"), (seeds[0].records[-1]["total"]["pair"], "norm")):
        record[key] = None
    said = conclusion([*no_control, seeds[0]])
    assert said.startswith("plus has a loss of 1.5000 at step 2. 50 % of its updates")
    where = "is NaN or Inf in 1 of 2 measured steps, first in 2"
    assert said.endswith(f"bf16 {where}; fp32 {where}; runs that end so are not compared: {ADVICE}.")
    del no_control[1].records[-1]["loss"]  # logged no more
    assert "end at different steps" in conclusion([no_control[1], seeds[1]])
    assert conclusion([read_log(write("a.jsonl", {"step": 1}), "a")]) == "No run logged a loss, nor what arrives."
