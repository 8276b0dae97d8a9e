"""What a process may have set that changes the meaning of plain calls of torch: a step runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_SUBNORMAL = 5e-324
"""Equals zero just if this thread takes subnormal numbers for zero: torch has no function that says so."""

_NOTHING = nullcontext()


def usual() -> AbstractContextManager[None]:
    """A context in which tensors are made on the CPU unless said otherwise, and subnormal numbers are kept.

    Other threads of torch flush subnormal numbers as before: a thread takes the mode of the one that started it.
    """
    # `torch.get_default_device` fails after `torch.set_default_device(None)`.
    flushes, elsewhere = _SUBNORMAL == 0.0, not torch.empty(0).is_cpu
    return _changed(flushes) if flushes or elsewhere else _NOTHING


@contextmanager
def _changed(flushes: bool) -> Iterator[None]:
    with torch.device("cpu"):  # the numbers of a step are the host's, on which their addresses are read
        if flushes:
            torch.set_flush_denormal(False)
        try:
            yield
        finally:
            if flushes:
                torch.set_flush_denormal(True)
