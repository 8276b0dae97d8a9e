"""Logs in: what a killed run leaves is read, and what is no log is refused by its line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from run_logs import ABOUT, Write, line

pytest.importorskip("plotly")

from collage_neuron.cli.main import main
from collage_neuron.errors import LogError
from collage_neuron.monitoring.run_log import read_log, read_logs


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
