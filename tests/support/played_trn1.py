"""Python as on a trn1: `played_trn1.py FILE ...`, `-m MODULE ...` or `-c TEXT` runs with the stand-in as Neuron's NKI.

XLA's CPU is the core, and says that it is one of a trn1. A kernel that is called on its tensors runs on copies of them,
in the place of a custom call. Evidence level of what runs here: stand-in.

`PLAYED_DIALECT` is the NKI that is installed; `PLAYED_PYTHON` a program that is this file, for what a script starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import nki_standin
import torch_xla.core.xla_model as xm
from nki_standin import Device, dialect_beta1, dialect_nki
from played_neuron import execute
from torch import Tensor

from collage_neuron.passes.backends.nki import schedule

CORE = "NC_v2"
"""What Neuron's plug-in calls a core of trn1."""


def on_copies(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of the stand-in, also for tensors of XLA's device, where its results are then."""

    def moved(machine: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *mutable: Any) -> Any:
        devices = {x.device for x in args if isinstance(x, Tensor)}
        if len(devices) != 1 or next(iter(devices)).type != "xla":
            return run(machine, function, args, kwargs, *mutable)
        (device,) = devices
        xm.unlazy([x for x in args if isinstance(x, Tensor)])  # one program for all: each alone would compile one
        here = tuple(x.cpu() if isinstance(x, Tensor) else x for x in args)
        results = run(machine, function, here, kwargs, *mutable)
        return tuple(x.to(device) for x in results) if isinstance(results, tuple) else results.to(device)

    return moved


def play() -> None:
    """From here on this process is on a trn1; the search for the best engines is short, as in most tests."""
    schedule.STARTS, schedule.STEPS = 1, 300
    sys.executable = os.environ["PLAYED_PYTHON"]
    xm.xla_device_kind = lambda device=None: CORE  # type: ignore[method-assign, unused-ignore]
    for dialect in (dialect_nki, dialect_beta1):
        dialect.run = on_copies(dialect.run)  # type: ignore[attr-defined]


def run(arguments: list[str]) -> None:
    """Runs what the command line of Python names, on a trn1."""
    stochastic = os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN") == "1"
    device = Device(overflow="infinity", stochastic=stochastic)
    with nki_standin.install(os.environ["PLAYED_DIALECT"], "trn1", device):
        play()
        execute(arguments)


if __name__ == "__main__":
    run(sys.argv[1:])
