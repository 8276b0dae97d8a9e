"""The XLA backend: every parameter's update is one user computation on its torch_xla device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator

import torch

from collage_neuron.numerics.block_words import BLOCK
from collage_neuron.numerics.formats import BY_ELEMENT
from collage_neuron.passes.backends.by_parameter import ByParameter, Lowered
from collage_neuron.passes.backends.xla.lower import XlaUpdate
from collage_neuron.passes.ir.update import Update


class Xla(ByParameter):
    """Runs updates on torch_xla devices of any kind."""

    name = "xla"
    devices = ("xla",)
    layouts = frozenset({BY_ELEMENT, f"block:{BLOCK}"})
    measures = True
    draws = True

    def lower(self, update: Update) -> Lowered:
        """A function that compiles the update once per shape of a parameter."""
        return XlaUpdate(update)

    def prepare(self, device: torch.device) -> None:
        """Raises ValueError for a device that is not torch_xla's."""
        if device.type not in self.devices:
            raise ValueError(
                f"backend='xla' needs parameters on an XLA device, they are on {device}; use backend='auto'"
            )

    def found(self) -> Iterator[Callable[[], torch.device]]:
        """Torch_xla's device, where that is installed."""
        if importlib.util.find_spec("torch_xla") is not None:
            yield open_device


def open_device() -> torch.device:
    """The device of torch_xla; RuntimeError if it cannot be opened."""
    if importlib.util.find_spec("libneuronxla") is None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")  # as torch_xla itself would choose NEURON otherwise
    import torch_xla  # an extra: imported only to probe it

    return torch_xla.device()


BACKEND = Xla()
