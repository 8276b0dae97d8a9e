"""Contexts: whether steps may run as written, which are decorators too; and a backend that is registered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from collage_neuron.errors import RunsAsWritten
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.protocol import Backend

B = TypeVar("B", bound=Backend)


@contextmanager
def registered(backend: B) -> Iterator[B]:
    """A backend that there is meanwhile."""
    registry.register(backend)
    try:
        yield backend
    finally:
        registry.unregister(backend.name)


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
