"""The command itself, without one of its commands."""

import subprocess
import sys

import pytest

from collage_neuron import __version__
from collage_neuron.cli.main import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"collage_neuron {__version__}\n")


def test_no_command_waits_for_what_it_does_not_need() -> None:
    """Importing torch takes three seconds; its compiler, which a first optimizer imports, would take two more."""
    code = "import sys, collage_neuron.cli.main; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_it_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr().err
    assert all(f"    {name}" in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_says_what_it_shows_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert f"Shows {COMMANDS[command]}." in " ".join(said.split())
    assert f"\ncollage_neuron {command}" in said
    assert max(map(len, said.splitlines())) <= 110
