"""What a process may have set that changes the meaning of plain calls of torch: a step runs without it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_SUBNORMAL = 5e-324
"""Equals zero just if this thread takes subnormal numbers for zero: torch has no function that says so."""

_NOTHING = nullcontext()


class _DefaultDtype:
    """fp32 as the default dtype, which all threads of a process share.

    The last of several steps that run at once restores what the first one has replaced.
    """

    def __init__(self) -> None:
        self._lock, self.inside, self._before = threading.Lock(), 0, torch.float32

    def __enter__(self) -> None:
        with self._lock:
            if not self.inside:
                self._before = torch.get_default_dtype()
                torch.set_default_dtype(torch.float32)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if not self.inside:
                torch.set_default_dtype(self._before)


_FP32 = _DefaultDtype()


def plain_defaults() -> AbstractContextManager[None]:
    """A context in which tensors are made in fp32 on the CPU unless said otherwise, and subnormal numbers are kept.

    A user's step runs in it too, so that the numbers that it makes (`torch.tensor(0.1)`) are those of an fp32 run, as
    are its parameters. Other threads of torch flush subnormal numbers as before: a thread takes the mode of the one
    that started it.
    """
    # `torch.get_default_device` fails after `torch.set_default_device(None)`.
    flushes, elsewhere = _SUBNORMAL == 0.0, not torch.empty(0).is_cpu
    other = _FP32.inside or torch.get_default_dtype() is not torch.float32
    return _changed(flushes, elsewhere) if flushes or elsewhere or other else _NOTHING


@contextmanager
def _changed(flushes: bool, elsewhere: bool) -> Iterator[None]:
    # The numbers of a step are the host's, on which their addresses are read.
    with torch.device("cpu") if elsewhere else _NOTHING, _FP32:
        if flushes:
            torch.set_flush_denormal(False)
        try:
            yield
        finally:
            if flushes:
                torch.set_flush_denormal(True)
