"""Errors and warnings that a user can catch, and the line of user code that an error points at."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class UnsupportedUpdate(RuntimeError):
    """The optimizer's update cannot be rewritten; the message has the operation, reason, line and a remedy."""


class UnknownUpdate(UnsupportedUpdate):
    """What the next step does is not known before it is taken: it may be compiled then."""


class RunsAsWritten(UnsupportedUpdate, UserWarning):
    """Steps run as written, since they cannot be compiled. As an error it is raised before anything changes."""


class UnsupportedModel(RuntimeError):
    """The forward of a model cannot run its matmuls in fp8; the message has torch's reason and a remedy."""


@contextmanager
def pointing_at(place: object | None) -> Iterator[None]:
    """Appends the line that called an operation to the message of an UnsupportedUpdate about it."""
    try:
        yield
    except UnsupportedUpdate as error:
        if place is None:
            raise
        # With the cause of the first: what is looked for there (torch's own words) is not in a message of ours.
        raise type(error)(f"{error} (at {place})") from error.__cause__


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the program that called us, however deep in our code, or torch's, the reason is found."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("collage_neuron", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


class StepSkipped(BaseException):
    """Ends a step that was begun before it was known whether gradients are finite; nobody outside sees it."""


class StepInterrupted(RuntimeError):
    """A backend failed after it had updated some parameters; the optimizer needs its last checkpoint."""


class UnsafeEnvironment(RuntimeError):
    """Settings of the process or the device would silently defeat compensated arithmetic."""


class NoMachine(ValueError):
    """Kernels cannot run here: NKI or a Trainium device is missing."""


class UnsafeFolder(RuntimeError):
    """Other users can write to the folder of kernels."""


class VerificationError(AssertionError):
    """A pass broke an invariant of the IR: a bug of collage_neuron, not an error of the user."""


class LogError(ValueError):
    """A file is not the log of a run; the message names the line, the problem and a remedy."""


class StrategyChanged(UserWarning):
    """An optimizer with states was compiled again for another strategy; the message says what is gained and lost."""


class RoundedWeights(UserWarning):
    """Weights were rounded to bf16: loaded into a compiled model, frozen, or without low words in a checkpoint."""


class RoundedAverage(UserWarning):
    """Other code averages the bf16 parameters of a compiled model; the message says what to use."""


class ClampedDivisor(UserWarning):
    """A kernel divides by what may be smaller than the numbers that Trainium is documented to divide by."""


class ComputedOnHost(UserWarning):
    """The reference form of an update runs on the CPU, since the device would narrow its types."""


class Fp32Products(UserWarning):
    """The operands of a matmul are rounded to fp8, and multiplied in fp32: nothing is gained."""


class ScriptError(Exception):
    """The script does not do what `compare` needs; the message says what, where and what to do."""


class TranslationError(RuntimeError):
    """The rewritten update does not do what the optimizer's own `step()` does; nothing was updated."""


@contextmanager
def naming(base: type) -> Iterator[None]:
    """A context that puts the name of an optimizer's class in front of an UnsupportedUpdate without it."""
    try:
        yield
    except UnsupportedUpdate as error:
        if base.__name__ in str(error):
            raise
        raise type(error)(f"{base.__name__} cannot be compiled: {error}") from error
