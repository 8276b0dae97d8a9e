"""`python -m collage_neuron kernels`: folders that cannot be written to, and a reader that stops reading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collage_neuron.cli import kernel_costs, kernels
from collage_neuron.cli.kernels import KERNELS
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
    assert capsys.readouterr().err == (
        f"kernels: {given} is not a folder that can be written to ({path} is a file); name another one\n"
    )
    assert path.read_text() == "kept"


def test_the_list_says_how_many_examples_and_that_none_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"{len(KERNELS)} examples, each for trn1, trn1_beta1, trn2, trn3 (trn1_beta1 in")
    assert "gets its kernel in its first step, so nothing here is needed to train." in said


def test_a_model_is_answered_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"plus": {"trn1": 23.09, "trn2": 1.94}, "fp32": {"trn1": 11.0, "trn2": 10.04}}
    monkeypatch.setattr(kernel_costs, "milliseconds", lambda strategy, shapes, kernel_of: times[strategy])
    assert main(["kernels", "--model", "gpt2", "--strategy", "plus"]) == 0
    assert " ".join(capsys.readouterr().out.split()) == (
        "GPT-2 (124 M), one step of AdamW under plus: 23.1 ms on 1 core of trn1, 1.94 on trn2; fp32 master weights: "
        "11 ms on trn1, 10 on trn2. Estimates by a cost model; nothing has run on a device."
    )


def test_a_reader_that_has_read_enough_ends_it_without_a_traceback() -> None:
    """As `| head -1` does."""
    command = [sys.executable, "-m", "collage_neuron", "kernels"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()  # before anything is written
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert "BrokenPipeError" not in errors
    assert process.returncode == 1
