"""`python -m collage_neuron kernels`: folders that cannot be written to, and a reader that stops reading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collage_neuron.cli import kernels
from collage_neuron.cli.main import main


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_to_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "source", lambda folder, name: "")
    path = tmp_path / "file"
    path.write_text("kept")
    given = path if place == "a file" else path / "folder"
    assert main(["kernels", "--write", str(given)]) == 2
    assert capsys.readouterr().out.startswith(f"{given} is not a folder that can be written to (")
    assert path.read_text() == "kept"


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
