"""The command itself, without one of its commands."""

import pytest

from collage_neuron import __version__
from collage_neuron.cli.main import main


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"collage_neuron {__version__}\n")
