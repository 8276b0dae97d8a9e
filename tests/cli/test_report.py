"""A report: logs in, one page out, and what it concludes; a page is written whole or not at all."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from run_logs import ABOUT, Write, line

import collage_neuron
from collage_neuron.cli.charts import COLUMNS, FLOOR, above_fp32, module_maps
from collage_neuron.cli.main import main
from collage_neuron.cli.report import page, verdicts
from collage_neuron.errors import LogError
from collage_neuron.explanation import about
from collage_neuron.monitoring.metrics import ADVICE
from collage_neuron.monitoring.run_log import read_log, read_logs

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
    assert "link" not in found.tags
    assert found.tags.count("section") == 8  # loss, EDQ, lost, raw, a stall, a memory, a map of each run
    assert found.tags.count("script") == 9  # plotly.js, and one for each chart
    assert {"<b>", "12", "0.9000", "exp_avg_sq 12.5 %", "Memory: peak", "EDQ by module: <b>"} <= set(found.texts)
    assert "<b>: the last line is cut off; the run was killed there." in found.texts


def test_a_name_that_ends_a_script_is_data(write: Write) -> None:
    log = read_log(write("a.jsonl", ABOUT, line(1)), "</script><script>alert(1)")
    assert Page(page([log])).tags.count("script") == 8  # as without: plotly.js, and one for each chart


def test_a_map_leaves_out_steps_of_a_long_run(write: Write) -> None:
    steps = [line(i, 0.5 if i % 4 == 1 else 1.0) for i in range(1, 2 * COLUMNS + 1)]
    ((name, drawn),) = module_maps([read_log(write("a.jsonl", ABOUT, *steps), "a")])
    (trace,) = drawn["data"]
    assert (name, trace["y"], trace["x"]) == ("EDQ by module: a", ["head", "body.0"], [*range(1, 2 * COLUMNS, 2)])
    head, body = trace["z"]
    assert head[:2] == [round(math.log10(0.5), 3), math.log10(FLOOR)]
    assert body[0] == math.log10(FLOOR)


def test_a_missing_package_is_named_with_the_extra(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "plotly.io"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "r.html"
    assert main(["report", str(write("a.jsonl", line(1))), "--out", str(out)]) == 2
    assert capsys.readouterr().err == "report: the page needs plotly; pip install '.[report]'\n"
    assert not out.exists()


def test_the_page_is_whole_or_it_says_why_not(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, out = write("a.jsonl", line(1)), write("b.jsonl", "no", line(1)), tmp_path / "r.html"
    assert main(["report", str(good), str(bad), "--out", str(out)]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not out.exists()
    assert main(["report", str(good), "--out", str(out)]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser"
    assert second.startswith("a    loss 3.0000  EDQ 0.5000  lost 50.00 %: updates are lost")
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(good), "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "none/r.html cannot be written (No such file or directory); name another" in capsys.readouterr().err
    assert list(tmp_path.glob("*.tmp")) == []


def test_the_table_has_the_learning_rate_the_seed_and_what_ran(write: Write) -> None:
    abouts = [ABOUT | {"lr": 3e-4, "seed": 7, "versions": {"torch": v}, "backend": "native"} for v in ("2.9", "2.13")]
    text = page(read_logs([write(f"{i}.jsonl", about, line(1)) for i, about in enumerate(abouts)]))
    assert "<td>0.0003<td>7<td>" in text
    assert "<td>native<td>torch 2.9<tr>" in text


def test_losses_are_drawn_above_those_of_fp32_from_the_same_seed(write: Write) -> None:
    logs = [
        read_log(write(f"{name}.jsonl", {"strategy": name, "seed": seed}, *(line(s) for s in (1, 2))), name)
        for name, seed in (("fp32", 0), ("plus", 0), ("bf16", 1))
    ]
    logs[1].records[1]["loss"] += 0.01
    drawn = above_fp32(logs[:2])
    assert drawn is not None
    assert [(t["name"], t["x"], t["y"]) for t in drawn["data"]] == [("plus", [1, 2], [0.0, 0.01])]
    assert above_fp32([logs[0], logs[2]]) is None  # another seed
    assert above_fp32(logs[1:2]) is None
    assert "Loss above fp32" in Page(page(logs[:2])).texts


def test_a_log_says_the_learning_rate_that_a_schedule_begins_from() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=3e-4)
    collage_neuron.compile(optimizer)
    assert about(optimizer)["lr"] == "0.0003"
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10)
    assert (optimizer.param_groups[0]["lr"], about(optimizer)["lr"]) == (0, "0.0003")


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
        ({"step": 2, "modules": [1]}, "line 3 .*its numbers are not what a monitor writes"),
        ({"step": 2, "modules": {"head": 5}}, "line 3 .*its numbers are not what a monitor writes"),
        ({"step": 2, "total": 5}, "line 3 .*its numbers are not what a monitor writes"),
        ({"step": 2, "total": {"pair": "all"}}, "line 3 .*its numbers are not what a monitor writes"),
        ({"step": 2, "total": {"stalled": [1]}}, "line 3 .*its numbers are not what a monitor writes"),
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


def test_a_run_without_a_step_is_left_out(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("runs/a.jsonl", ABOUT, line(1))
    new = write("runs/b.jsonl", ABOUT)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")]) == 0
    assert f"report: left out: {new} holds no measured step" in capsys.readouterr().err
    assert "<h1>a</h1>" in (tmp_path / "r.html").read_text()
    assert main(["report", str(new), "--out", str(tmp_path / "r.html")]) == 2
    write("runs/a.jsonl", ABOUT)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "r.html")]) == 2
    assert "runs holds no log with a measured step" in capsys.readouterr().err.splitlines()[-1]


# --- what a report says of each run: how much of its updates arrived ------------------------------------------------


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
    where = "NaN or Inf in {} of 10 measured steps, first in {}"
    small = "fp32 loses them too: the updates are small beside the weights"
    assert verdicts(logs) == [
        "run plus  plus  loss 0.3000  EDQ 1.0000  lost 0.00 %: nothing to mend",
        f"run bf16  bf16  loss 0.3000  EDQ 0.5000  lost 50.00 %: updates are lost: {more}",
        f"run fp32  fp32  loss 0.3000  EDQ 0.5000  lost 50.00 %: {small}",
        f"run late  late  loss 0.3000  EDQ 1.0000  lost 8.01 %: {late}",
        "run bare  bare  loss 0.3000: what arrives of its updates was not measured",
        f"run nans  nans               EDQ 1.0000  lost 0.00 %   {where.format(4, 7)}: {ADVICE}",
        f"run skip  skip  loss 0.3000  EDQ 1.0000  lost 0.00 %   {where.format(1, 3)}: nothing to mend",
    ]
