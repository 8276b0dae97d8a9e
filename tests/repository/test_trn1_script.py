"""examples/trn1_pretrain.sh from its first line to its last, in small, on a machine that is played.

Evidence level: stand-in, with XLA's CPU as the core (`played_trn1.py`). What a step does on a lazy device, validation
on drawn values too, is what it does on a trn1; the kernels are run by the stand-in, and not by a compiler of Neuron.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import WHOLE

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
NEEDED = ("torch_xla", "matplotlib", "tqdm")

SMALL = ("--quick", "--steps", "3", "--strategies", "plus", "--data", str(ROOT / "CHANGELOG.md"))
"""Options for pretrain.py: validation at the first two steps, and a third one that is watched."""
PROBE = "--only rounding_stochastic"
"""A group of questions, in a process of its own; all others are asked in test_device_report.py."""


def played(folder: Path, dialect: str, python: Path) -> dict[str, str]:
    """The environment of a machine with a core, its plug-in, and an NKI of this dialect."""
    (folder / "neuron0").touch()
    (folder / "libneuronxla").mkdir()
    (folder / "libneuronxla" / "__init__.py").touch()
    path = os.pathsep.join(map(str, (folder, SUPPORT, ROOT)))
    own = {
        "PYTHON": python, "PLAYED_PYTHON": python, "PLAYED_DIALECT": dialect, "PYTHONPATH": path, "PROBE": PROBE,
        "DEVICE_FILES": folder / "neuron*", "PJRT_DEVICE": "CPU", "COLLAGE_NEURON_CACHE": folder / "kernels",
        "OUT": folder / "out", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return os.environ | {name: str(value) for name, value in own.items()}


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["beta1", "nki"] if WHOLE else ["beta1"])  # nki: backends/nki/test_stages.py
def test_it_runs_to_its_end(dialect: str, tmp_path: Path) -> None:
    """The first steps are validated on drawn values, as on each lazy device: there a kernel that differs raises."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed")
    command, python = [str(ROOT / "examples" / "trn1_pretrain.sh"), *SMALL], tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SUPPORT / "played_trn1.py"}" "$@"\n')
    python.chmod(0o755)
    env = played(tmp_path, dialect, python)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for line in ("== doctor", "== probe", "== pretrain", "== done"):
        assert line in done.stdout, said
    assert "loses roundings" not in said
    assert ", nki" in next(line for line in done.stdout.splitlines() if line.startswith("ready on: ")), said
    assert "strategy plus, 12 B each" in said, said
    assert "; backend nki" in said, said

    probe = json.loads((tmp_path / "out" / "device_probe.json").read_text())
    assert (probe["evidence"], probe["nki"]["dialect"]) == ("stand-in", dialect)
    answers = {name: x["answer"] for group in probe["answers"].values() for name, x in group.items()}
    assert answers["rounding_vector"] == "to either neighbour: stochastic?"

    results = {r["strategy"]: r for r in json.loads((tmp_path / "out" / "pretrain.json").read_text())}
    assert {name: len(r["train"]) for name, r in results.items()} == {"plus": 3}
    assert results["plus"]["bytes_per_parameter"] == 12
    assert (tmp_path / "out" / "pretrain.png").stat().st_size > 0
    steps = [path.read_text() for path in (tmp_path / "kernels").glob("collage_step_*.py")]
    assert steps
    assert all(("neuronxcc" in text) is (dialect == "beta1") for text in steps)
