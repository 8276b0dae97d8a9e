"""The garbage collector, while it would only be in the way."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LISTING = threading.Lock()
"""Held by a thread that lists all objects, in whose midst no other may switch the collector on."""


@contextmanager
def paused() -> Iterator[None]:
    """A context without collections, for work that makes many objects and leaves no cycles: recordings of a step.

    Each of its collections would look at all objects of the process. What is garbage by then is collected afterwards.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            with LISTING:
                gc.enable()
