"""A report: logs in, one page out, and what it concludes; a page is written whole or not at all."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from collage_neuron.cli.charts import COLUMNS, FLOOR, above_fp32
from collage_neuron.cli.main import main
from collage_neuron.cli.report import conclusion, page, title, verdicts
from collage_neuron.errors import LogError
from collage_neuron.monitoring.metrics import ADVICE
from collage_neuron.monitoring.run_log import read_log, read_logs

Write = Callable[..., Path]
"""Writes a log: its name, and its lines."""

ABOUT = {"strategy": "plus", "bytes_per_parameter": 12.0}


def measures(ratio: float) -> dict[str, Any]:
    effect = {"norm": 1.0, "edq": ratio, "ratio": ratio, "lost": 100 * (1 - ratio)}
    return {"elements": 4, "raw_norm": 1.0, "pair": effect, "high": effect, "stalled": {"exp_avg_sq": 12.5}}


def line(step: int, ratio: float = 0.5) -> dict[str, Any]:
    modules = {"head": measures(ratio), "body.0": measures(1.0)}
    return {"step": step, "loss": 3.0 / step, "total": measures(ratio), "modules": modules, "memory": {"peak": 2**20}}


# --- one page out: it stands alone, shows every run, and is written whole or not at all -------------------------------

pytest.importorskip("plotly")


class Page(HTMLParser):
    """The tags and texts of a page; attributes that would fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and v[0] != "#"]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def test_the_page_stands_alone_and_shows_every_run(write: Write) -> None:
    logs = read_logs([write("a.jsonl", ABOUT, line(1), line(2)), write("<b>.jsonl", ABOUT, line(1, 0.9), "{", end="")])
    found = Page(page(logs))
    assert found.fetched == []
    assert found.tags.count("script") == 3  # plotly.js, the figures, what draws them
    assert "link" not in found.tags
    assert found.tags.count("section") == 8  # loss, EDQ, lost, raw, a stall, a memory, a map of each run
    assert {"<b>", "12", "0.9000", "exp_avg_sq 12.5 %", "Memory: peak", "EDQ by module: <b>"} <= set(found.texts)
    assert len(figures(page(logs))) == 8
    assert "<b>: the last line is cut off; the run was killed there." in found.texts


def figures(text: str) -> dict[str, Any]:
    """What the page draws: `data` and `layout` of each chart."""
    found = re.search(r"<script type='application/json' id=figures>(.*?)</script>", text)
    assert found is not None
    figures: dict[str, Any] = json.loads(found[1])
    return figures


def test_a_name_that_ends_a_script_is_data(write: Write) -> None:
    log = read_log(write("a.jsonl", ABOUT, line(1)), "</script><script>alert(1)")
    found = Page(page([log]))
    assert found.tags.count("script") == 3
    assert figures(page([log]))["chart0"]["data"][0]["name"] == log.name


def test_a_map_averages_neighbours_and_names_what_bare_numbers_are(write: Write) -> None:
    kinds = {"module_kinds": {"body.0": "Linear"}}
    steps = [line(i, 1.0 if i % 2 else 0.5) for i in range(1, 2 * COLUMNS + 1)]
    log = read_log(write("a.jsonl", ABOUT | kinds, *steps), "a")
    drawn = figures(page([log]))["chart6"]
    head, body = drawn["data"][0]["z"]
    assert len(drawn["data"][0]["x"]) == len(head) == COLUMNS
    assert head[0] == round(math.log10((FLOOR + 0.5) / 2), 3)
    assert body[0] == math.log10(FLOOR)
    assert drawn["layout"]["yaxis"]["ticktext"] == ["head", "body.0 (Linear)"]


def test_a_missing_package_is_named_with_the_extra(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.offline"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "r.html"
    assert main(["report", str(write("a.jsonl", line(1))), "--out", str(out)]) == 2
    assert capsys.readouterr().err == "report: the page needs plotly; pip install '.[report]'\n"
    assert not out.exists()


def test_the_command_writes_the_page_whole_or_says_why_not(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, out = write("a.jsonl", line(1)), write("b.jsonl", "no", line(1)), tmp_path / "r.html"
    assert main(["report", str(good), str(bad), "--out", str(out)]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not out.exists()
    assert main(["report", str(good), "--out", str(out)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser"
    assert second.startswith("a    EDQ 0.5000  lost 50.00 %: updates are lost")
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(good), "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "none/r.html cannot be written (No such file or directory); name another" in capsys.readouterr().err
    assert list(tmp_path.glob("*.tmp")) == []


def test_the_table_has_the_learning_rate_and_seed_and_below_it_what_ran(write: Write) -> None:
    abouts = [ABOUT | {"lr": 3e-4, "seed": 7, "versions": {"torch": v}, "backend": "native"} for v in ("2.9", "2.13")]
    text = page(read_logs([write(f"{i}.jsonl", about, line(1)) for i, about in enumerate(abouts)]))
    assert "<td data-name='learning rate'>0.0003</td><td data-name='seed'>7</td>" in text
    assert "<p class=note>0: torch 2.9, backend native</p><p class=note>1: torch 2.13, backend native</p>" in text
    both = page(read_logs([write("0.jsonl", abouts[0], line(1)), write("2.jsonl", abouts[0], line(1))]))
    assert "<p class=note>torch 2.9, backend native</p>" in both


def test_losses_are_drawn_above_those_of_fp32_from_the_same_seed(write: Write) -> None:
    logs = [
        read_log(write(f"{name}.jsonl", {"strategy": name, "seed": seed}, *(line(s) for s in (1, 2))), name)
        for name, seed in (("fp32", 0), ("plus", 0), ("bf16", 1))
    ]
    logs[1].records[1]["loss"] += 0.01
    drawn = above_fp32(logs[:2])
    assert drawn is not None
    assert [(t["name"], t["x"], t["text"]) for t in drawn["data"]] == [("plus", [1, 2], ["+0.00000", "+0.01000"])]
    assert above_fp32([logs[0], logs[2]]) is None  # another seed
    assert above_fp32(logs[1:2]) is None
    assert "Loss above fp32" in Page(page(logs[:2])).texts


# --- logs in: what a killed run leaves is read, and what is no log is refused by its line -----------------------------

pytest.importorskip("plotly")


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_half_a_last_line_is_left_out(write: Write, cut: int) -> None:
    log = read_log(write("a.jsonl", ABOUT, line(1), json.dumps(line(2))[:cut], end=""), "a")
    assert log.steps == [1]
    assert log.truncated


def test_a_run_that_goes_back_goes_on_from_there(write: Write) -> None:
    """As after a resume: of the steps that are taken again nothing is left, nor of those that were to come again."""
    log = read_log(write("a.jsonl", ABOUT, line(1), line(2), line(3), ABOUT, line(2) | {"loss": 7.0}), "a")
    assert log.series(lambda r: r["loss"]) == ([1, 2], [3.0, 7.0])
    # Others write what JSON does not have.
    log = read_log(write("a.jsonl", line(1), line(2) | {"loss": math.nan}, line(3, math.inf)), "a")
    assert (log.nonfinite, log.broken, log.records[2]["modules"]["head"]["pair"]["ratio"]) == ([2], False, None)


@pytest.mark.parametrize(
    ("foreign", "why"),
    [
        ("epoch 3: loss 2.5", "line 3 .*not JSON"),
        (json.dumps(line(2))[:40], "line 3 .*not JSON"),  # half a line, but not the last: two runs wrote one file
        ("[1, 2]", "line 3 .*not a JSON object"),
        ({"step": "two"}, "line 3 .*step is 'two'"),
        ({"step": 2, "modules": [1]}, "line 3 .*its modules are not what a monitor writes"),
        ({"step": 2, "modules": {"head": 5}}, "line 3 .*its modules are not what a monitor writes"),
        ({"step": 2, "total": 5}, "line 3 .*its total is not what a monitor writes"),
        ({"step": 2, "total": {"pair": "all"}}, "line 3 .*its total is not what a monitor writes"),
        ({"step": 2, "total": {"pair": {"ratio": "all"}}}, "line 3 .*its total is not what a monitor writes"),
        ({"step": 2, "total": {"stalled": [1]}}, "line 3 .*its total is not what a monitor writes"),
    ],
)
def test_a_foreign_line_is_named_with_its_file_and_number(write: Write, foreign: object, why: str) -> None:
    path = write("a.jsonl", ABOUT, line(1), foreign, line(3))
    with pytest.raises(LogError, match=f"{re.escape(str(path))}, {why}.*a run wrote"):
        read_log(path, "a")


def test_a_file_without_a_step_a_picture_and_a_missing_file_are_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no measured step"):
        read_log(write("a.jsonl", ABOUT), "a")
    (tmp_path / "b.jsonl").write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(LogError, match=r"b\.jsonl cannot be read as text"):
        read_log(tmp_path / "b.jsonl", "b")
    with pytest.raises(LogError, match=r"there is no file or folder .*c\.jsonl; a run writes its log with monitor"):
        read_log(tmp_path / "c.jsonl", "c")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogError, match=r"holds no \.jsonl file"):
        read_logs([tmp_path / "empty"])


def test_the_folder_of_compare_is_answered_with_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "compare"
    folder.mkdir()
    (folder / "compare.html").write_text("")
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"; the command compare writes a page of its own, here {folder / 'compare.html'}. A run writes a log" in said
    assert "to=JsonLog('runs/name.jsonl'))" in said


def test_a_run_of_a_folder_that_has_no_step_yet_is_left_out_and_named(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("runs/a.jsonl", ABOUT, line(1))
    new = write("runs/b.jsonl", ABOUT)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")]) == 0
    assert f"report: left out: {new} holds no measured step" in capsys.readouterr().err
    assert "<h1>a</h1>" in (tmp_path / "r.html").read_text()
    assert main(["report", str(new), "--out", str(tmp_path / "r.html")]) == 2
    write("runs/a.jsonl", ABOUT)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")]) == 2
    assert "runs holds no log with a measured step" in capsys.readouterr().err.splitlines()[-1]


# --- what a report concludes: its title, the runs' losses beside fp32's, and how much of the updates arrived ----------


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
