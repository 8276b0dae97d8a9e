"""Logs in, one page out: what a killed run leaves is read, what is no log is refused by line, the page stands alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")

from collage_neuron.cli.charts import CHARTS, Lines, line_chart
from collage_neuron.cli.conclusion import conclusion, shown_share, title
from collage_neuron.cli.main import main
from collage_neuron.cli.module_maps import COLUMNS, FLOOR, maps
from collage_neuron.cli.report_page import page
from collage_neuron.errors import LogError
from collage_neuron.monitoring.run_log import read_log, read_logs


def measures(ratio: float) -> dict[str, Any]:
    effect = {"norm": 1.0, "edq": ratio, "ratio": ratio, "lost": 100 * (1 - ratio)}
    return {"elements": 4, "raw_norm": 1.0, "pair": effect, "high": effect, "stalled": {"exp_avg_sq": 12.5}}


def line(step: int, ratio: float = 0.5) -> dict[str, Any]:
    modules = {"head": measures(ratio), "body.0": measures(1.0)}
    return {"step": step, "loss": 3.0 / step, "total": measures(ratio), "modules": modules, "memory": {"peak": 2**20}}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def writer(name: str, *lines: object, end: str = "\n") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + end)
        return path

    return writer


ABOUT = {"strategy": "plus", "bytes_per_parameter": 12.0}


def test_a_log_is_its_lines(write: Write) -> None:
    log = read_log(write("a.jsonl", ABOUT, line(1), line(2)), "a")
    assert log.about == ABOUT
    assert log.steps == [1, 2]
    assert log.series(lambda r: r["loss"]) == ([1, 2], [3.0, 1.5])
    assert not log.truncated


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_half_a_last_line_is_left_out(write: Write, cut: int) -> None:
    log = read_log(write("a.jsonl", ABOUT, line(1), json.dumps(line(2))[:cut], end=""), "a")
    assert log.steps == [1]
    assert log.truncated


def test_a_whole_last_line_without_its_end_counts(write: Write) -> None:
    log = read_log(write("a.jsonl", line(1), line(2), end=""), "a")
    assert (log.steps, log.truncated) == ([1, 2], False)


def test_a_run_that_goes_back_goes_on_from_there(write: Write) -> None:
    """As after a resume: of the steps that are taken again nothing is left, nor of those that were to come again."""
    log = read_log(write("a.jsonl", ABOUT, line(1), line(2), line(3), ABOUT, line(2) | {"loss": 7.0}), "a")
    assert log.series(lambda r: r["loss"]) == ([1, 2], [3.0, 7.0])


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


@pytest.mark.parametrize(
    ("memory", "charts"),
    [(2**20, {"Memory"}), ({"gpu": {"peak": 2**20}}, {"Memory: gpu/peak"}), ({"peak": None}, set())],
)
def test_memory_is_drawn_however_it_was_logged(write: Write, memory: Any, charts: set[str]) -> None:
    found = Page(page(read_logs([write("a.jsonl", line(1) | {"memory": memory})])))
    assert {text for text in found.texts if text.startswith("Memory")} == charts


def test_runs_are_named_by_what_tells_them_apart(write: Write, tmp_path: Path) -> None:
    paths = [write(name, line(1)) for name in ("x/plus/log.jsonl", "x/bf16/log.jsonl")]
    assert [log.name for log in read_logs(paths)] == ["plus/log", "bf16/log"]
    assert [log.name for log in read_logs([tmp_path / "x"])] == ["bf16/log", "plus/log"]
    assert len({log.name for log in read_logs([paths[0], paths[0]])}) == 2


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
    assert [link for link in found.fetched if not link.startswith("data:image/png;base64,")] == []
    assert found.tags.count("script") == 3  # plotly.js, the figures, what draws them
    assert "link" not in found.tags
    assert found.tags.count("section") == 8  # loss, EDQ, lost, raw, a stall, a memory, a map of each run
    assert {"<b>", "12", "0.9000", "exp_avg_sq 12.5 %", "Memory: peak", "EDQ by module: <b>"} <= set(found.texts)
    assert len(figures(page(logs))) == 8
    assert "<b>: the last line is cut off; the run was killed there." in found.texts


def test_maps_begin_a_row_of_their_own_and_cells_know_their_headings(write: Write) -> None:
    """Cards of a row have one height, and maps are higher than curves; on a telephone the table has no head."""
    text = page([read_log(write("a.jsonl", ABOUT, line(1), line(2)), "a")])
    curves, maps = text.split("<div class=cards>")[1:]
    assert "<h2>EDQ by module" not in curves
    assert maps.count("<section>") == maps.count("<h2>EDQ by module") == 1
    head, run = re.findall(r"<tr>(.*?)</tr>", text)
    assert re.findall(r"data-name='(.*?)'", run) == re.findall(r"<th>(.*?)</th>", head)[1:]


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


def traces(chart: Lines, write: Write, strategies: Sequence[str]) -> list[dict[str, Any]]:
    logs = [read_log(write(f"{name}.jsonl", {"strategy": name}, line(1), line(2)), name) for name in strategies]
    drawn = line_chart(chart, logs)
    assert drawn is not None
    return list(drawn["data"])


def test_ours_are_drawn_at_least_as_strong_as_baselines_and_never_over_them(write: Write) -> None:
    names = ("fp32", "light", "bf16", "plus", "split422")
    found = traces(CHARTS[0], write, names)
    assert [trace["name"] for trace in found] == ["light", "plus", "split422", "fp32", "bf16"]
    widths = [trace["line"]["width"] for trace in found]
    assert widths == sorted(widths, reverse=True)
    assert min(widths[:3]) > max(widths[3:])
    assert {trace["name"]: trace["meta"] for trace in found} == {name: i for i, name in enumerate(names)}


def test_the_bf16_word_is_drawn_apart_only_where_it_differs(write: Write) -> None:
    assert len(traces(CHARTS[1], write, ["bf16"])) == 1
    low = line(1)
    low["total"]["high"] = {"norm": 1.0, "edq": 0.25, "ratio": 0.25, "lost": 75.0}
    drawn = line_chart(CHARTS[1], [read_log(write("p.jsonl", low), "p")])
    assert drawn is not None
    assert sorted((t["name"], t["y"], t["showlegend"]) for t in drawn["data"]) == [
        ("p", [0.5], True),
        ("p, bf16 word alone", [0.25], False),
    ]
    assert len({t["legendgroup"] for t in drawn["data"]}) == 1


def test_a_map_averages_neighbours_and_names_what_bare_numbers_are(write: Write) -> None:
    kinds = {"module_kinds": {"body.0": "Linear"}}
    steps = [line(i, 1.0 if i % 2 else 0.5) for i in range(1, 2 * COLUMNS + 1)]
    log = read_log(write("a.jsonl", ABOUT | kinds, *steps), "a")
    (found,) = maps([log])
    assert list(found.modules) == ["head", "body.0"]
    assert len(found.steps) == len(found.cells[0]) == COLUMNS
    assert found.cells[0][0] == (FLOOR + 0.5) / 2
    assert found.cells[1][0] == FLOOR
    assert figures(page([log]))["chart6"]["layout"]["yaxis"]["ticktext"] == ["head", "body.0 (Linear)"]


def test_a_module_that_was_not_measured_has_no_colour(write: Write) -> None:
    bare = line(2) | {"modules": {"head": {"pair": {"ratio": None}}}}
    (found,) = maps([read_log(write("a.jsonl", line(1), bare), "a")])
    assert found.cells == [[0.5, None], [FLOOR, None]]


# What it concludes ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0, "0 %"),
        (0.000237, "less than 0.01 %"),
        (0.0234, "0.02 %"),
        (1.2345, "1.23 %"),
        (66.67, "66.7 %"),
        (100, "100 %"),
    ],
)
def test_the_conclusion_rounds_shares_to_what_means_something(share: float, said: str) -> None:
    assert shown_share(share) == said


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
    assert conclusion([read_log(write("a.jsonl", {"step": 1}), "a")]) == "No run logged a loss, nor what arrives."


@pytest.mark.parametrize(
    ("package", "words"), [("plotly", "the page needs plotly"), ("matplotlib", "--map needs matplotlib")]
)
def test_a_missing_package_is_named_with_the_extra(
    package: str, words: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "r.html"
    assert main(["report", str(write("a.jsonl", line(1))), "--out", str(out), "--map", str(tmp_path / "m.png")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "pip install '.[report]'" in said
    assert not out.exists()


def test_runs_without_modules_or_loss_have_no_such_charts(write: Write) -> None:
    bare = {"step": 1, "total": measures(0.5)}
    found = Page(page(read_logs([write("a.jsonl", bare)])))
    assert not {"Loss", "EDQ by module: a"} & set(found.texts)
    assert "Lost updates" in found.texts


def test_the_command_writes_the_page_whole_or_says_why_not(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, out = write("a.jsonl", line(1)), write("b.jsonl", "no", line(1)), tmp_path / "r.html"
    assert main(["report", str(good), str(bad), "--out", str(out)]) == 2
    assert "line 1" in capsys.readouterr().err
    assert not out.exists()
    assert main(["report", str(good), "--out", str(out)]) == 0
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(good), "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "none/r.html cannot be written (No such file or directory); name another" in capsys.readouterr().err
    assert list(tmp_path.glob("*.tmp")) == []


def test_the_maps_alone_are_a_picture(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bare, out = write("a.jsonl", line(1), line(2)), write("b.jsonl", {"step": 1}), tmp_path / "r.html"
    assert main(["report", str(good), "--out", str(out), "--map", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(bare), "--out", str(out), "--map", str(tmp_path / "none.png")]) == 2
    assert "no run logged its modules" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", str(good), "--map", "map.txt"])
    assert "map.txt is not a picture: name a file that ends in .png" in capsys.readouterr().err
