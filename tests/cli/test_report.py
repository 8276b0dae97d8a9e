"""One page out: it stands alone, shows every run, and is written whole or not at all."""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from run_logs import ABOUT, Write, line

pytest.importorskip("plotly")

import collage_neuron
from collage_neuron.cli.charts import COLUMNS, FLOOR, above_fp32
from collage_neuron.cli.main import main
from collage_neuron.cli.report import page
from collage_neuron.explanation import about
from collage_neuron.monitoring.run_log import read_log, read_logs


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


def test_a_log_says_the_learning_rate_that_a_schedule_begins_from() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=3e-4)
    collage_neuron.compile(optimizer)
    assert about(optimizer)["lr"] == "0.0003"
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10)
    assert (optimizer.param_groups[0]["lr"], about(optimizer)["lr"]) == (0, "0.0003")
