"""Every error and warning of the project that a user can catch, and the line of their code that a refusal points at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UnsupportedUpdate(RuntimeError):
    """The optimizer's update cannot be rewritten; the message says which operation, why, what to do, and where."""


@contextmanager
def pointing_at(place: object | None) -> Iterator[None]:
    """Puts the place where an operation was called behind a refusal of it."""
    try:
        yield
    except UnsupportedUpdate as error:
        if place is None:
            raise
        raise UnsupportedUpdate(f"{error} (at {place})") from error.__cause__


class UnsafeEnvironment(RuntimeError):
    """The process is set up so that compensated arithmetic would silently be worth nothing."""


class NoMachine(ValueError):
    """There is no NKI, or no Trainium, to run kernels on."""


class UnsafeFolder(RuntimeError):
    """Somebody else could write into the folder of kernels."""


class VerificationError(AssertionError):
    """A pass broke an invariant: an error of collage_neuron, not of the user."""


class LogError(ValueError):
    """A file is not the log of a run; the message says which line, what is wrong, and what to do."""


class StrategyChanged(UserWarning):
    """An optimizer that has states was compiled for another strategy; the message says what is gained or lost."""


class ScriptError(Exception):
    """The script does not do what `compare` needs; the message says what, where and what to do."""


class TranslationError(RuntimeError):
    """The rewritten update does not do what the optimizer's own `step()` does; nothing was updated."""
