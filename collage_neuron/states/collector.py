"""The garbage collector, while it would only be in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """A context without collections, for work that makes many objects and leaves no cycles: recordings of a step.

    Each of its collections would look at all objects of the process. What is garbage by then is collected afterwards.
    The collector is not switched off: code that asks for that, or does it, is none of ours.
    """
    before = gc.get_threshold()
    gc.set_threshold(0, *before[1:])  # of new objects, from which on they are collected; 0 is never
    try:
        yield
    finally:
        if not gc.get_threshold()[0]:  # else somebody has set it meanwhile, or another thread has ended its own pause
            gc.set_threshold(*before)
