"""The enumerations of `nki.isa`, with the documented members and numbers."""

from __future__ import annotations

from enum import Enum


class engine(Enum):
    """Engines."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):
    """What `activation` does with its accumulators; only idle is in the stand-in."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class oob_mode(Enum):
    """What a dynamic access out of bounds does; there are none in the stand-in."""

    error = 0
    skip = 1


class dge_mode(Enum):
    """Who generates the descriptors of a DMA."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class nc_version(Enum):
    """Generations of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4
