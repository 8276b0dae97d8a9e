"""The compiled optimizer, a subclass of the user's class: its step, loading of states, and its other methods."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from collage_neuron.optimizer.compiled import Compiled, compiled_class
from collage_neuron.settings import Settings

__all__ = ["Compiled", "compiled_class"]  # pickles name them here


def __getattr__(name: str) -> type[Optimizer]:
    """`CollageAdamW`, ...: the compiled form of every class of torch.optim can be imported by name."""
    base = getattr(torch.optim, name.removeprefix("Collage"), None) if name.startswith("Collage") else None
    if isinstance(base, type) and issubclass(base, Optimizer) and base is not Optimizer:
        return compiled_class(base, Settings())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
