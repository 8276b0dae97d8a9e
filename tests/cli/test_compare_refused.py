"""Scripts that `compare` cannot compare: each is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from collage_neuron.cli.main import main

pytestmark = pytest.mark.usefixtures("rejecting")


def test_a_missing_script_a_wrong_strategy_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("")
    assert main(["compare", "--out", str(tmp_path / "a.txt")]) == 2
    # Nothing was trained.
    said = f"compare: {tmp_path / 'a.txt'} cannot be written (File exists); name a folder with --out\n"
    assert capsys.readouterr().err == said
    for text in ("-1", str(2**32), "one"):  # NumPy takes none of these
        with pytest.raises(SystemExit):
            main(["compare", "--seeds", text])
        assert f"'{text}' is not a seed: give 0 to 4294967295" in capsys.readouterr().err


def test_a_script_that_fails_is_shown_with_its_last_lines(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import nosuchmodule")
    assert main(["compare", script.name, "--strategies", "plus"]) == 1  # relative, as one types it
    said = capsys.readouterr().err
    assert "line 1, in <module>" in said
    assert "No module named 'nosuchmodule'" in said
    assert said.splitlines()[-1] == "compare: mine.py failed under plus with status 1"
