"""Updates by rows and columns (CAME) on a CPU: captured where that is faster than `step()` as written on fp32 copies.

The captured update costs 2.5 ms of Python for each parameter more than copies, and half as much for each element:
they meet at about a million elements (CAME, one thread). Short rows, rows that do not lie one after the other, and
random bits are left to the reference, which takes longer than copies at any size.
"""

from __future__ import annotations

from statistics import fmean

from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.update import Update
from collage_neuron.settings import Settings

LEAST = 2**20
"""Elements of a matrix, on average, from which on an update by rows is captured; 0 for all."""

SHORT = 32
"""Elements of a row below which native code leaves it to the reference."""


def slower(optimizer: Optimizer, update: Update, settings: Settings) -> UnsupportedUpdate | None:
    """Why steps should rather run on copies; None if they should not, or if the settings ask for something else."""
    matrices = [p for group in optimizer.param_groups for p in group["params"] if p.dim() > 1 and p.numel()]
    chosen = settings.unsupported != "twin" or settings.backend != "auto"
    if chosen or not update.by_rows or not matrices or any(p.device.type != "cpu" for p in matrices):
        return None
    elements = fmean(p.numel() for p in matrices)
    lie_well = all(p.shape[-1] >= SHORT and p.is_contiguous() for p in matrices)
    if not LEAST or (elements >= LEAST and lie_well and not update.draws):
        return None
    return UnsupportedUpdate(
        f"its means of rows and columns are computed faster as written than captured, with matrices of {elements:,.0f} "
        f"elements on average (captured from {LEAST:,} on, if rows have {SHORT} elements or more, lie one after the "
        "other, and nothing is drawn; or if backend='native' asks for it)"
    )
