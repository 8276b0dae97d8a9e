"""Images and scripts for other machines, as far as this one can tell: linters, and what is said without a device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def linter(name: str) -> str:
    """The linter beside this Python, or on the path; the `lint` extra installs both where they have wheels."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return found or pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", [p.name for p in sorted((ROOT / "docker").glob("Dockerfile*"))])
def test_hadolint(name: str) -> None:
    done = subprocess.run([linter("hadolint"), ROOT / "docker" / name], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_hadolint_finds_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp\n")
    done = subprocess.run([linter("hadolint"), tmp_path / "Dockerfile"], capture_output=True, text=True, check=False)
    assert "DL3006" in done.stdout


@pytest.mark.parametrize("script", [s for s in ("examples/trn1_pretrain.sh", ".ci/run") if (ROOT / s).exists()])
def test_shellcheck(script: str) -> None:
    done = subprocess.run([linter("shellcheck"), ROOT / script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


def test_the_trn1_script_says_what_is_missing(tmp_path: Path) -> None:
    if list(Path("/dev").glob("neuron*")):
        pytest.skip("there is a Neuron device")
    env = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run([ROOT / "examples/trn1_pretrain.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no /dev/neuron*: run it on a trn1 instance" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_neuron_image_is_the_one_that_the_pages_name() -> None:
    base = "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.28.0-ubuntu24.04"
    assert f"ARG BASE={base}\nFROM ${{BASE}}" in (ROOT / "docker/Dockerfile.neuron").read_text()
    assert base in (ROOT / "docker/README.md").read_text()
    assert "SDK 2.28" in (ROOT / "docs/trn1.md").read_text()
