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


reduce_cmd = Enum("reduce_cmd", "idle reset reduce reset_reduce load_reduce", start=0)
"""What `activation` does with its accumulators; only idle is in the stand-in."""
oob_mode = Enum("oob_mode", "error skip", start=0)
"""What a dynamic access out of bounds does; there are none in the stand-in."""
dge_mode = Enum("dge_mode", "unknown swdge hwdge none", start=0)
"""Who generates the descriptors of a DMA; only unknown is in the stand-in."""
