"""How far a steady step travels through the code: at most half of what it did before the layout had sub-packages."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = {"between collage_neuron/ and passes/": 93, "between files": 446}
"""What `benchmarks/crossings.py` printed when it was written."""


def test_a_steady_step_crosses_at_most_half_as_often_as_at_first() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "crossings.py"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    for what, before in FIRST.items():
        found = re.search(rf"calls {re.escape(what)} +(\d+)", done.stdout)
        assert found, done.stdout
        assert int(found[1]) <= before // 2, done.stdout
