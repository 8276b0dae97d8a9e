"""Python as on a trn2 with TorchNeuron: `played_neuron.py FILE ...` or `-m MODULE ...` runs with the stand-ins.

`PLAYED_PYTHON` is a program that is this file, for what a script starts. Evidence level of what runs here: stand-in.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import nki_standin

from collage_neuron.passes.backends.nki import schedule


def execute(arguments: list[str]) -> None:
    """Runs what the command line of Python names."""
    first, *rest = arguments
    if first == "-c":
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = rest if first == "-m" else arguments
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.path.insert(0, str(Path(first).resolve().parent))
    runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch_neuronx_standin  # not with torch 2.9, in which `played_trn1` runs

    schedule.STARTS, schedule.STEPS = 1, 300  # a short search for the best engines, as in most tests
    sys.executable = os.environ["PLAYED_PYTHON"]
    stochastic = os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") == "1"
    with torch_neuronx_standin.install("trn2", nki_standin.Device(overflow="infinity", stochastic=stochastic)):
        execute(sys.argv[1:])
