"""Programs and commands on a machine with TorchNeuron that is played: training, comparison, probe, doctor."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


@pytest.fixture
def played(tmp_path: Path) -> dict[str, str]:
    """The environment of such a machine."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SUPPORT / "played_neuron.py"}" "$@"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {
        "PLAYED_PYTHON": python, "PYTHONPATH": path, "COLLAGE_NEURON_CACHE": tmp_path / "kernels",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return os.environ | {name: str(value) for name, value in own.items()}


def run(played: dict[str, str], folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [played["PLAYED_PYTHON"], *arguments], env=played, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


PRETRAIN = str(ROOT / "examples" / "pretrain.py")
SMALL = ("--device", "neuron", "--quick", "--steps", "4", "--data", str(ROOT / "CHANGELOG.md"))


@pytest.fixture
def _demo() -> None:
    if missing := [name for name in ("matplotlib", "tqdm") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")


@pytest.mark.usefixtures("_demo")
def test_the_demo_trains_on_the_device_and_resumes(played: dict[str, str], tmp_path: Path) -> None:
    options = (PRETRAIN, *SMALL, "--strategies", "plus", "--checkpoint", "saved")
    said = run(played, tmp_path, *options, "--out", "first")
    assert "; backend nki" in said
    results = {r["strategy"]: r for r in json.loads((tmp_path / "first" / "pretrain.json").read_text())}
    assert {name: (len(r["train"]), r["bytes_per_parameter"]) for name, r in results.items()} == {"plus": (4, 12)}
    run(played, tmp_path, *options, "--out", "again", "--resume")
    again = {r["strategy"]: r for r in json.loads((tmp_path / "again" / "pretrain.json").read_text())}
    assert {name: r["train"] for name, r in again.items()} == {name: r["train"] for name, r in results.items()}


@pytest.mark.usefixtures("_demo")
def test_the_demo_takes_the_device_unasked(played: dict[str, str], tmp_path: Path) -> None:
    assert "(default: neuron)" in run(played, tmp_path, PRETRAIN, "--help")


def test_the_command_compare_runs_there(played: dict[str, str], tmp_path: Path) -> None:
    said = run(played, tmp_path, "-m", "collage_neuron", "compare", "--strategies", "plus", "--", "--steps", "3")
    assert "bytes/parameter" in said


def test_the_doctor_is_ready_on_nki(played: dict[str, str], tmp_path: Path) -> None:
    said = run(played, tmp_path, "-m", "collage_neuron", "doctor")
    assert "nki" in said.splitlines()[-1].partition("; not:")[0], said


def test_the_probe_asks_the_device(played: dict[str, str], tmp_path: Path) -> None:
    """A kernel changes its argument here, so the tensor that was given has the new values."""
    probe = str(ROOT / "examples" / "device_probe.py")
    run(played, tmp_path, probe, "--only", "aliasing", "rounding", "generated", "types", "cores", "--out", "probe.json")
    found = json.loads((tmp_path / "probe.json").read_text())
    answers = {name: x["answer"] for group in found["answers"].values() for name, x in group.items()}
    assert found["evidence"] == "stand-in"
    assert answers["aliasing"] == "x + y is returned; the tensor that was given holds the new values"
    assert answers["generated_roundings"] == "every rounding is kept"
    assert answers["generated_adamw"].startswith(("the same bits", "param_lo differ; "))
    assert answers["logical_cores"] == "one physical core, of a trn2"
    assert answers["integer_sums"] == "exactly"
    assert answers["wide_types"] == "float64 is fp32; int64 is int32"
    assert "error" not in answers.values(), found


def test_the_report_is_made_on_the_device(played: dict[str, str], tmp_path: Path) -> None:
    report = str(ROOT / "examples" / "device_report.py")
    run(played, tmp_path, report, "--quick", "--only", "machine", "steps", "times", "--out", "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["evidence"], found["machine"]["all"]["found"]["nki"]["dialect"]) == ("stand-in", "nki")
    assert found["note"].startswith("NOTHING HERE WAS MEASURED ON A DEVICE")
    answers = {name: x["answer"] for name, x in found["steps"]["split433"]["found"].items()}
    assert answers["nki on neuron:0, SGD"] == "the same bits"
    assert answers["nki on neuron:0, AdamW"].startswith("param_lo differ; ")
    assert set(found["times"]["plus"]["found"]) == {"nki on neuron:0"}
