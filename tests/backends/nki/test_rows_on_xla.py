"""Steps by rows on a device that records graphs, each kernel in one of its own (stand-in, XLA's CPU as the core)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["nki"])
def test_on_a_trn1_that_is_played(dialect: str, tmp_path: Path) -> None:
    """Numbers are computed by XLA, which contracts products and sums: values of rows differ by an ulp."""
    pytest.importorskip("torch_xla")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SUPPORT / "played_trn1.py"}" "$@"\n')
    python.chmod(0o755)
    own = {
        "PLAYED_PYTHON": str(python), "PLAYED_DIALECT": dialect, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1",
        "COLLAGE_NEURON_CACHE": str(tmp_path / "kernels"), "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]),
    }  # fmt: skip
    command = [str(python), str(SUPPORT / "rows_on_trn1.py")]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["Came: 21 tensors agree", "Mini: 8 tensors agree"]
