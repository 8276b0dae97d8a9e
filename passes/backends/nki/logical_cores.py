"""Finds out whether two physical cores would run one kernel, which would both update every element in place.

Trn2 and trn3 group physical NeuronCores into logical ones (LNC, 1 or 2 of them). Kernels here are written for one. With
`NEURON_LOGICAL_NC_CONFIG=2` NKI 0.7 makes a program for each core, and both would do the whole step: an element that
the second one loads after the first one's store takes two steps. Without that variable `nki.jit` makes one program and
neuronx-cc expects two (error NCC_EVRF066). Nothing of it ran on a device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import torch

from collage_neuron.errors import NoMachine

VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
FLAGS = "NEURON_CC_FLAGS"


def require_one_core(device: torch.device, target: str, kind: str) -> None:
    """Raises NoMachine unless a logical core of `device`, which calls itself `kind`, is one physical core."""
    if target == "trn1" or device.type not in ("neuron", "xla"):  # trn1 has no other; a CPU simulates one
        return
    found = dict(_said(device, kind)) or {"nothing is set, and 2 is the default of neuronx-cc": "2"}
    if wrong := [what for what, cores in found.items() if cores != "1"]:
        raise NoMachine(
            f"a logical core of {device} ({target}) is not one physical core ({'; '.join(wrong)}): two would run each "
            f"kernel, and both would update every element. Set {VARIABLE}=1 before the process starts, and no --lnc in "
            f"{FLAGS} but --lnc=1; or use backend={'reference' if device.type == 'neuron' else 'xla'!r}"
        )


def _said(device: torch.device, kind: str) -> Iterator[tuple[str, str]]:
    """What is known of the physical cores in a logical one: where from, and how many."""
    if VARIABLE in os.environ:
        yield f"{VARIABLE}={os.environ[VARIABLE]}", os.environ[VARIABLE].strip()
    for flag, cores in re.findall(r"(-lnc|--logical-nc-config)[= ]\s*(\S+)", os.environ.get(FLAGS, "")):
        yield f"{FLAGS} has {flag} {cores}", cores
    if kind.endswith("d"):
        yield f"it is a {kind}: two cores, seen as one", "2"
    if device.type == "neuron":
        yield from _of_torch()


def _of_torch() -> Iterator[tuple[str, str]]:
    """What TorchNeuron knows, if it has the function that AWS's own kernels for it ask."""
    try:
        from torch_neuronx.utils import get_logical_neuron_cores

        cores = str(get_logical_neuron_cores())
    except Exception:  # it is documented nowhere, and may be missing or raise what it likes
        return
    yield f"torch_neuronx.utils.get_logical_neuron_cores() is {cores}", cores
