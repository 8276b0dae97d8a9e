"""TorchNeuron's device `neuron` (trn2, trn3): whether this process has one, which generation it is, what it narrows.

From AWS's documentation of SDK 2.33; nothing here ran on a device. `tests/torchneuron` runs it on a device of that name
which is written in Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from collage_neuron.errors import NoMachine

NAME = "neuron"
"""The type of its devices."""
PRODUCT = Path("/sys/devices/virtual/dmi/id/product_name")
"""A file of Linux with the type of the instance, such as trn2.48xlarge."""


def narrows(device: torch.device) -> bool:
    """Returns True if its operations take float64 for fp32 and int64 for int32, as TorchNeuron's do, without a word."""
    return device.type == NAME


def is_installed() -> bool:
    """Returns True if TorchNeuron is installed, or has registered its device; imports nothing."""
    # Up to torch 2.9 the package of the same name is that of PyTorch/XLA, and registers another device.
    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    return version >= (2, 10) and (hasattr(torch, NAME) or importlib.util.find_spec("torch_neuronx") is not None)


def open_device() -> torch.device:
    """Its first device; imports what registers it. NoMachine if there is none, or the error of its package."""
    if not hasattr(torch, NAME):
        importlib.import_module("torch_neuronx")
    if not getattr(torch, NAME).is_available():
        raise NoMachine("TorchNeuron is installed and finds no device: torch.neuron.is_available() is False")
    return torch.device(NAME, 0)


def generation_name(device: torch.device) -> str:
    """What the device is called, by the first of `SOURCES` that knows.

    Raises:
        NoMachine: none knows; the message has what each said.
    """
    said = []
    for what, ask in SOURCES.items():
        answer = _answer(ask, device)
        if (name := known(answer)) is not None:
            return name
        said.append(f"{what}: {answer}")
    raise NoMachine(
        f"which Trainium {device} is cannot be found out ({'; '.join(said)}): set NEURON_PLATFORM_TARGET_OVERRIDE to "
        "trn2 or trn3"
    )


def _answer(ask: Callable[[torch.device], Any], device: torch.device) -> str:
    try:
        return str(ask(device))
    except Exception as error:  # what the device's packages raise, where they do not know, is their own
        return f"{type(error).__name__}: {error}"


def known(text: str) -> str | None:
    """The part of a name that says the generation: of "trn2.48xlarge" and "trn2u.48xlarge" it is "trn2"."""
    found = re.search(r"(?<![a-z])(trn[1-9]|inf2|gen[2-9])|(nc_v[2-9]d?)", text.strip().lower())
    return found[0].replace("nc_v", "NC_v") if found else None


SOURCES: Mapping[str, Callable[[torch.device], Any]] = {
    "torch_neuronx.utils.get_platform_target": lambda _: importlib.import_module(
        "torch_neuronx.utils"
    ).get_platform_target(),
    "torch.neuron.get_device_name": lambda device: getattr(torch, NAME).get_device_name(device),
    "torch.neuron.get_device_properties": lambda device: getattr(torch, NAME).get_device_properties(device).name,
    "the instance type": lambda _: PRODUCT.read_text().strip(),
}
"""Who knows the generation, beside the variable that NKI reads: the documented function first."""
