"""Errors that a step raises because its values wait: torch's own about placeholders, and not those of the code."""

from __future__ import annotations

import dis

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.trace.tensor_places import Exchanged

_OF_TORCH = RuntimeError, NotImplementedError, TypeError, IndexError, ValueError, Exchanged


def is_of_torch(error: BaseException) -> bool:
    """Returns True for an error that may come from placeholders."""
    # Exact classes: what is derived from them is an error of somebody's own.
    return type(error) in _OF_TORCH and not _raised_by_code(error)


def _raised_by_code(error: BaseException) -> bool:
    """Returns True for an error that a line of neither torch's nor ours raises: not in an operation."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_frame.f_globals.get("__name__", "").startswith(("torch.", "collage_neuron.")):
        return False
    # A `raise` statement: where an operation fails, the last instruction is a call.
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def repeated(error: BaseException) -> UnsupportedUpdate:
    """What is raised at the end of a step that has caught an error about what waits."""
    return error if isinstance(error, UnsupportedUpdate) else Exchanged(f"step() catches {error}")
