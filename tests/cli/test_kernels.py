"""`python -m collage_neuron kernels`: folders that cannot be written to, and a reader that stops reading."""

from __future__ import annotations

from pathlib import Path

import pytest

from collage_neuron.cli import kernels
from collage_neuron.cli.main import main


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_to_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "source", lambda folder, name: pytest.fail("generated before the folder is checked"))
    path = tmp_path / "file"
    path.write_text("kept")
    given = path if place == "a file" else path / "folder"
    assert main(["kernels", "--write", str(given)]) == 2
    why = "File exists" if given == path else "Not a directory"
    said = f"kernels: {given} is not a folder that can be written to ({why}); name another one\n"
    assert capsys.readouterr().err == said
    assert path.read_text() == "kept"


def test_a_model_is_answered_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"plus": {"trn1": 23.09, "trn2": 1.94}, "fp32": {"trn1": 11.0, "trn2": 10.04}}
    monkeypatch.setattr(kernels, "milliseconds", lambda strategy, shapes: times[strategy])
    assert main(["kernels", "--model", "gpt2", "--strategy", "plus"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == (
        "GPT-2 (124 M), one step of AdamW under plus: 23.1 ms on 1 core of trn1, 1.94 on trn2; fp32 master weights: "
        "11 ms on trn1, 10 on trn2. Estimates by a cost model; nothing has run on a device."
    )
