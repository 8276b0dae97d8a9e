"""The command itself, without one of its commands."""

import importlib.util
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import part

import collage_neuron
from collage_neuron import __version__
from collage_neuron.cli.main import COMMANDS, main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"collage_neuron {__version__} (Python {platform.python_version()}, torch 2.")
    assert ("torch_xla" in said) == (importlib.util.find_spec("torch_xla") is not None)


@pytest.mark.parametrize("given", ["--version", "--help"])
def test_what_needs_no_torch_does_not_wait_for_it(given: str) -> None:
    """Importing torch takes two seconds."""
    command = [sys.executable, "-X", "importtime", "-m", "collage_neuron", given]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "collage_neuron" in done.stdout
    assert not re.search(r"\| +(torch|collage_neuron\.api)$", done.stderr, re.MULTILINE)


PUBLIC = """
import pickle, sys, collage_neuron
assert "torch" not in sys.modules
{first}
assert callable(collage_neuron.compile) and callable(collage_neuron.explain)
names = {{}}
exec("from collage_neuron import *", names)
assert set(collage_neuron.__all__) <= {{*names, *dir(collage_neuron)}} & names.keys()
assert pickle.loads(pickle.dumps(collage_neuron.Record)) is names["Record"]
assert not hasattr(collage_neuron, "complie")
assert "torch._dynamo" not in sys.modules  # takes two seconds more, and only a first optimizer needs it
"""


FIRST = (
    "import collage_neuron.explanation", "from collage_neuron.api import compile", "dir(collage_neuron)",
    "collage_neuron.errors.StepInterrupted",
)  # fmt: skip


@pytest.mark.parametrize("first", part(FIRST, 4))
def test_public_names_are_there_whatever_is_imported_first(first: str) -> None:
    subprocess.run([sys.executable, "-c", PUBLIC.format(first=first)], check=True)


def test_no_public_name_hides_a_file() -> None:
    """Python binds a submodule to its name when it is imported, which would hide a function of that name."""
    files = {path.stem for path in Path(collage_neuron.__file__).parent.glob("*.py")}
    assert not files.intersection(collage_neuron.__all__)


def test_without_a_command_it_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert not err
    assert all(f"    {name}" in out for name in COMMANDS)
    said = " ".join(out.split())
    assert "] COMMAND ... collage_neuron trains models in bf16 without losing the small updates" in said
    assert "`collage_neuron.compile` is all that a script needs. These commands help to choose and to check." in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_a_command_shows_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    said = capsys.readouterr().out
    assert f"Shows {COMMANDS[command]}." in " ".join(said.split())
    assert f"\ncollage_neuron {command}" in said
    assert max(map(len, said.splitlines())) <= 110
