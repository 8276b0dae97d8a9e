"""Whether steps may run as written: contexts, which are decorators too."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from collage_neuron.errors import RunsAsWritten


@contextmanager
def compiled_only() -> Iterator[None]:
    """What cannot be compiled is rejected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunsAsWritten)
        yield


@contextmanager
def as_written_too() -> Iterator[None]:
    """What cannot be compiled runs as written, in a file whose other tests have the fixture `rejecting`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RunsAsWritten)
        yield
