"""Finds out the Trainium generation of a device, its physical cores, and the installed NKI.

Trn2 and trn3 group physical NeuronCores into logical ones (LNC, 1 or 2 of them; 2 is the default there). A kernel takes
its share of the lines on each (`dialects.SHARES`), and is called for as many cores as the compiler and the runtime have
(`kernel[2](...)`): another number is an error there (NCC_EVRF066). So the machine is asked, and where what it says
differs there is none. Nothing of it ran on a device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.errors import NoMachine
from collage_neuron.passes.backends.torch_neuron import NAME, generation_name

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"
"""The variable that tells NKI, and us, the target generation if the device does not (NKI documentation, `nki.jit`)."""

VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
"""The variable with the number of physical cores in a logical one."""
DEFAULT = "2"
"""That number from trn2 on, where nothing is set (logical-neuroncore-config.rst)."""
FLAGS = "NEURON_CC_FLAGS"
"""That with the compiler's options, which may say so too."""

GENERATIONS = {
    **dict.fromkeys(("trn1", "inf2", "gen2", "NC_v2"), "trn1"),
    **dict.fromkeys(("trn2", "gen3", "NC_v3", "NC_v3d"), "trn2"),
    **dict.fromkeys(("trn3", "gen4", "NC_v4"), "trn3"),
}
"""Targets by their names: in the variable above, and as `xm.xla_device_kind()`."""


WANTED = "the package nki, 0.6 or newer (Neuron SDK 2.32), or neuronx-cc with neuronxcc.nki (SDK 2.27 to 2.29)"
"""What can be the NKI that runs kernels."""


class Machine(NamedTuple):
    """The target and the dialect for which kernels are generated, and the physical cores that run each."""

    target: str
    dialect: str
    cores: int = 1


def is_trainium(device: torch.device) -> bool:
    """Returns True if `device` should run kernels: it is a Trainium, with NKI installed if there is an alternative."""
    is_xla = device.type == "xla" and _kind(device) in GENERATIONS and installed() is not None
    return is_xla or device.type == "neuron"


def machine_of(device: torch.device) -> Machine:
    """The machine behind `device`.

    Raises:
        NoMachine: NKI is not installed, or the generation of the device or its number of physical cores is unknown.
    """
    dialect = installed()
    if dialect is None:
        raise NoMachine(
            f"backend='nki' needs {WANTED}; neither is here. Install one from the Neuron repository, or use "
            "backend='auto'"
        )
    name = os.environ.get(TARGET) or _kind(device)
    if name not in GENERATIONS:
        remedy = "unset PJRT_DEVICE, or set it to NEURON" if _is_cpu_of_xla(device) else f"set {TARGET}"
        raise NoMachine(f"{device} is a {name}; kernels exist for {', '.join(GENERATIONS)}; {remedy}")
    target = GENERATIONS[name]
    # Trn1 has no logical cores of two physical ones.
    cores = cores_of(device, target, _kind(device) if device.type == "xla" else name) if target != "trn1" else 1
    return Machine(target, dialect, cores)


def cores_of(device: torch.device, target: str, kind: str) -> int:
    """The physical cores in a logical core of `device`, which calls itself `kind`; NoMachine if that is not clear."""
    if device.type == "cpu":  # simulated
        return 2 if os.environ.get(VARIABLE, "").strip() == "2" else 1
    found = dict(_said(device, kind)) or {"nothing is set": DEFAULT}
    (first, *others) = sorted(set(found.values()))
    if others or first not in ("1", "2"):
        raise NoMachine(
            f"how many physical cores a logical core of {device} ({target}) has is not clear ({'; '.join(found)}): for "
            f"another number a kernel does not compile, leaves elements out or updates them twice. Set {VARIABLE} to "
            f"1 or 2 before the process starts, and --lnc in {FLAGS} to the same or not at all; or use "
            f"backend={'reference' if device.type == 'neuron' else 'xla'!r}"
        )
    return int(first)


def _said(device: torch.device, kind: str) -> Iterator[tuple[str, str]]:
    """What is known of the physical cores in a logical one: where from, and how many."""
    if VARIABLE in os.environ:
        yield f"{VARIABLE}={os.environ[VARIABLE]}", os.environ[VARIABLE].strip()
    for flag, cores in re.findall(r"(-lnc|--logical-nc-config)[= ]\s*(\S+)", os.environ.get(FLAGS, "")):
        yield f"{FLAGS} has {flag} {cores}", cores
    if kind.endswith("d"):
        yield f"it is a {kind}: two cores", "2"
    if device.type == "neuron":  # AWS's own kernels for TorchNeuron ask this function
        try:
            from torch_neuronx.utils import get_logical_neuron_cores

            cores = str(get_logical_neuron_cores())
        except Exception:  # it is documented nowhere, and may be missing or raise what it likes
            return
        yield f"torch_neuronx.utils.get_logical_neuron_cores() is {cores}", cores


def generation(device: torch.device) -> str | None:
    """`trn1`, `trn2` or `trn3` if `device` is one; None for other devices, XLA's CPU among them."""
    if device.type not in ("neuron", "xla"):
        return None
    return None if _is_cpu_of_xla(device) else GENERATIONS.get(os.environ.get(TARGET) or _kind(device))


def _is_cpu_of_xla(device: torch.device) -> bool:
    return device.type == "xla" and _kind(device).upper() == "CPU"


@cache
def _kind(device: torch.device) -> str:
    """The name of the device's generation. A CPU, on which kernels are simulated, counts as a trn1."""
    if device.type == "neuron":
        return generation_name(device)
    if device.type != "xla":
        return "trn1"
    import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device
    import torch_xla.runtime as xr

    if xr.is_spmd():  # one device that stands for all: it has no kind, and would not split a kernel among them
        return "virtual device (SPMD)"
    return str(xm.xla_device_kind(str(device)))


def installed() -> str | None:
    """The dialect of the NKI that can be imported: `nki`, `beta1`, or None.

    A public index has placeholders for both packages, which fail on import or are empty.
    """
    return next((dialect for dialect, found in DIALECTS.items() if found() is not None), None)


def _module(name: str, *needs: str) -> Any:
    try:
        found = importlib.import_module(name)
    except Exception:  # a placeholder raises what it likes
        return None
    return found if all(hasattr(found, need) for need in needs) else None


def _nki() -> Any:
    """`nki` with a simulator (0.3) and compiled loops (0.6: release notes of NKI, docker/README.md)."""
    loops = _module("nki.language", "fori_loop")
    return _module("nki", "jit", "simulate") if loops is not None else None


def _beta1() -> Any:
    """`neuronxcc.nki`, unless it is beside `nki` 0.4 or newer: from SDK 2.30 on it is there and does not compile."""
    is_newer = _module("nki", "jit", "simulate") is not None and _version("nki") >= (0, 4)
    return None if is_newer else _module("neuronxcc.nki", "jit")


def _version(distribution: str) -> tuple[int, ...]:
    """The first two numbers of an installed version, such as `0.4.0+25940409122.gd30719f9`; (0, 0) if there is none."""
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


DIALECTS: dict[str, Callable[[], Any]] = {"nki": _nki, "beta1": _beta1}
"""Functions that find the package of each dialect; the newer dialect is tried first."""


XLA = "backend='xla'"
INSTEAD = "backend='reference' (on the CPU)"
"""On TorchNeuron, which has no XLA devices."""
UNPROVEN = f"{XLA} (rounds by bits for neuronx-cc, unproven on a device; the first step probes it)"
"""On a Trainium behind torch_xla."""


def advised(text: str, device: torch.device) -> str:
    """A message with the remedy that there is on `device`."""
    if device.type == NAME:
        return text.replace(XLA, INSTEAD)
    return text.replace(XLA, UNPROVEN) if XLA in text and generation(device) is not None else text
