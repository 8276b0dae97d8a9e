"""The one error of the stand-in, which names the line of the kernel that caused it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

HERE = str(Path(__file__).parent)


class StandinError(Exception):
    """A kernel did what the device cannot do, or what the documentation does not define."""


def sites() -> tuple[str, ...]:
    """`file:line` of the frames of the kernel, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    lines = []
    while frame.f_back is not None and not frame.f_code.co_filename.startswith(HERE):
        # Asked for each tile: a tenth of the time of a kernel, where a Path was made of it.
        lines.append(f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(lines)


def site() -> str:
    """`file:line` of the kernel's line that runs."""
    return sites()[0]


def fail(message: str) -> NoReturn:
    """Raises StandinError with the kernel's line before the message."""
    raise StandinError(f"{site()}: {message}")


def require(condition: object, message: str) -> None:
    """`fail` unless the condition holds. For each operand of each instruction a message would take too long to make."""
    if not condition:
        fail(message)
