"""What takes the place of a kernel on a device: remedies in messages of this backend name `backend='xla'`."""

from __future__ import annotations

import torch

from collage_neuron.passes.backends.nki.target import generation
from collage_neuron.passes.backends.torch_neuron import NAME

XLA = "backend='xla'"
INSTEAD = "backend='reference' (on the CPU)"
"""On TorchNeuron, which has no XLA devices."""
UNPROVEN = f"{XLA} (rounds by bits for neuronx-cc, unproven on a device; the first step probes it)"
"""On a Trainium behind torch_xla."""


def advised(text: str, device: torch.device) -> str:
    """A message with the remedy that there is on `device`."""
    if device.type == NAME:
        return text.replace(XLA, INSTEAD)
    if device.type == "xla" and XLA in text and generation(device) is not None:
        return text.replace(XLA, UNPROVEN)
    return text
