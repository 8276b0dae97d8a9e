"""Which Trainium a device is, and which NKI is installed for it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.errors import NoMachine

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""What tells NKI, and us, for which generation to compile, where the device does not (NKI documentation, `nki.jit`)."""

GENERATIONS = {
    **dict.fromkeys(("trn1", "inf2", "gen2", "NC_v2"), "trn1"),
    **dict.fromkeys(("trn2", "gen3", "NC_v3", "NC_v3d"), "trn2"),
    **dict.fromkeys(("trn3", "gen4", "NC_v4"), "trn3"),
}
"""Targets by the names that they go by: in the variable above, and as `xm.xla_device_kind()`."""


class Machine(NamedTuple):
    """What kernels are generated for."""

    target: str
    dialect: str


def is_trainium(device: torch.device) -> bool:
    """Whether kernels are what `device` should run: Trainium, with an NKI installed if there is another way."""
    return device.type == "neuron" or (
        device.type == "xla" and _kind(device) in GENERATIONS and installed() is not None
    )


def machine_of(device: torch.device) -> Machine:
    """The machine behind `device`.

    Raises:
        NoMachine: no NKI is installed, or the device is of no generation that is known.
    """
    dialect = installed()
    if dialect is None:
        raise NoMachine(
            "backend='nki' needs the package nki (Neuron SDK 2.29 or later), or neuronx-cc with neuronxcc.nki (2.26 to "
            "2.28); neither can be imported. Install one from the Neuron repository, or use backend='auto'"
        )
    name = os.environ.get(TARGET) or _kind(device)
    if name not in GENERATIONS:
        raise NoMachine(f"{device} is a {name}; kernels exist for {', '.join(GENERATIONS)}; set {TARGET}")
    return Machine(GENERATIONS[name], dialect)


@cache
def _kind(device: torch.device) -> str:
    """The name of the device's generation. A CPU, on which kernels are simulated, is taken for a trn1."""
    if device.type == "neuron":  # not verified on a device: torch-neuronx from SDK 2.33
        from torch_neuronx.utils import get_platform_target

        return str(get_platform_target())
    if device.type != "xla":
        return "trn1"
    import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device
    import torch_xla.runtime as xr

    if xr.is_spmd():  # one device that stands for all: it has no kind, and would not split a kernel among them
        return "virtual device (SPMD)"
    return str(xm.xla_device_kind(str(device)))


def installed() -> str | None:
    """The dialect of the NKI that can be imported: `nki`, `beta1`, or None.

    A public index has placeholders of both packages, which fail when they are imported or have nothing in them.
    """
    return next((dialect for dialect, found in DIALECTS.items() if found() is not None), None)


def _module(name: str, *needs: str) -> Any:
    try:
        found = importlib.import_module(name)
    except Exception:  # a placeholder raises what it likes
        return None
    return found if all(hasattr(found, need) for need in needs) else None


DIALECTS: dict[str, Callable[[], Any]] = {
    "nki": lambda: _module("nki", "jit", "simulate"),
    "beta1": lambda: _module("neuronxcc.nki", "jit"),
}
"""How each dialect's package is found; the newer one is asked first."""
