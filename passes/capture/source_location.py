"""Finds the source line in a user's `step()` to which an error message points.

This is the innermost line whose module is neither torch's nor ours; for an optimizer of torch, that in torch.optim.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import NamedTuple

_NOBODYS = {"torch", "torch_xla", "collage_neuron"}


class Place(NamedTuple):
    """A line in a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def here(outermost: FrameType | None) -> Place | None:
    """The place of the call, searched from the current frame to the frame `outermost`."""
    return _innermost(_callers(sys._getframe(1), outermost))


def raised_at(error: BaseException) -> Place | None:
    """The place where `error`, which has just been caught, was raised."""
    return _innermost(reversed(list(traceback.walk_tb(error.__traceback__))))


def _callers(frame: FrameType | None, outermost: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame is not outermost:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> Place | None:
    of_torch = None
    for frame, line in frames:
        module = _module(frame)
        if module.partition(".")[0] not in _NOBODYS:
            return Place(frame.f_code.co_filename, line)
        if of_torch is None and module.startswith("torch.optim."):
            of_torch = Place(frame.f_code.co_filename, line)
    return of_torch


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
