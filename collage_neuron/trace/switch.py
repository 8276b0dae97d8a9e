"""Which steps are traced: those of all classes that are not torch's own."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from torch.optim import Optimizer

from collage_neuron.passes.capture.position_aware import is_of_torch

TRACE = "COLLAGE_NEURON_TRACE"
"""The environment variable with which steps of torch's own classes are traced too, if it is "on"."""


def is_traced(base: type[Optimizer]) -> bool:
    """Returns True if steps of a class are traced; those of torch's own classes are recorded, which costs less."""
    return os.environ.get(TRACE) == "on" or not bool(_is_of_torch(base))


_is_of_torch: Any = lru_cache(256)(is_of_torch)
