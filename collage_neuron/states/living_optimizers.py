"""The compiled optimizers that are alive."""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.states.bookkeeping import LowWords, bookkeeping

_LIVING: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
"""The compiled optimizers, by identity. Parameters do not know them, and the garbage collector takes long to ask."""


def note_compiled(optimizer: Optimizer) -> None:
    """Lists a compiled optimizer among `compiled_optimizers`, as long as it lives."""
    _LIVING[id(optimizer)] = optimizer


def compiled_optimizers() -> list[Optimizer]:
    """All compiled optimizers of this process that are built and alive, copies too."""
    living = (x for reference in _LIVING.valuerefs() if (x := reference()) is not None)
    return [x for x in living if {"param_groups", "state"} <= vars(x).keys()]


def noted_words() -> dict[int, tuple[Optimizer, torch.Tensor, LowWords]]:
    """By the identity of a further word of a parameter: the optimizer that noted it, and with which parameter."""
    noted = ((x, p, low) for x in compiled_optimizers() for p, low in bookkeeping(x).marks.params.items())
    return {id(word): (x, p, low) for x, p, low in noted for word in low.words.values()}
