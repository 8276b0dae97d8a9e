"""A second start compiles nothing: another process generates the same kernels, byte for byte, under the same keys.

Compilers' caches are keyed by a graph that names the kernel's file, and that file is named by the hash of its text.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from worlds import run_script

PROGRAM = f"import sys\nsys.path.append({str(Path(__file__).parents[3] / 'benchmarks')!r})\n"
PROGRAM += """
import math
from kernel_examples import job
from collage_neuron.passes.backends.nki import schedule
from collage_neuron.passes.backends.nki.calls import program_of
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.backends.nki.target import Machine

schedule.STARTS, schedule.STEPS = 1, 200
shapes = [(64, 128), (5,), (3, 129)]
for name in ("sgd_momentum_light",):
    for machine in (Machine("trn1", "beta1"), Machine("trn2", "nki")):
        kernel = lower_to_nki(job(name).update, *machine[:2])
        print(name, *machine, program_of(machine, tuple((kernel, 0, math.prod(s), kernel.cut(s)) for s in shapes)))
"""


def test_processes_with_other_hashes_of_strings_give_kernels_the_same_keys(tmp_path: Path) -> None:
    """Python orders sets of strings by a hash that is another one in each process, unless it is told one."""
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 2
    assert done.stdout == run_script(tmp_path, PROGRAM)
