"""The sums and counts of a step, from what its kernel leaves: a total of each chunk of each line of a tensor.

No iteration of a kernel's loops reads what another one wrote, so that they stay loops in any order. The totals of a
chunk are fp32, of at most `tiling.SUMMED` terms; here they are added up: in float64 on the CPU, elsewhere in fp32, in
rows and then the sums of the rows. docs/development/evidence.md has the error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from collage_neuron.passes.backends.protocol import Measure
from collage_neuron.passes.ir.update import Update


def measure_of(update: Update, totals: Tensor) -> Measure:
    """The measurements of one parameter, from the flat totals of all chunks."""
    sums = len(update.sums)
    chunks = totals.view(-1, sums + len(update.counts))
    return Measure(_added(chunks[:, :sums]), _counted(chunks[:, sums:]))


def nothing(update: Update, device: torch.device) -> Measure:
    """The measurements of a parameter without elements."""
    dtype, whole = _types(device)
    sums, counts = len(update.sums), len(update.counts)
    return Measure(torch.zeros(sums, dtype=dtype, device=device), torch.zeros(counts, dtype=whole, device=device))


def _types(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    return (torch.float64, torch.int64) if device.type == "cpu" else (torch.float32, torch.int32)


def _added(x: Tensor) -> Tensor:
    """The sums of columns: of about as many rows as rows have numbers."""
    height = math.isqrt(len(x) - 1) + 1
    padded = torch.nn.functional.pad(x.to(_types(x.device)[0]), (0, 0, 0, -len(x) % height))
    return padded.view(-1, height, x.shape[1]).sum(1).sum(0)


def _counted(x: Tensor) -> Tensor:
    """The sums of columns of whole numbers of at most `SUMMED`: exact."""
    dtype = _types(x.device)[1]
    return x.to(dtype).sum(0, dtype=dtype)
