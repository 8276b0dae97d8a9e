"""Finds out whether code would catch an exception that is raised where it is now: a recording takes one way only."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType


def is_caught(frame: FrameType | None) -> bool:
    """Returns True if `frame`, or one that has called it, is in a `try`; not further than to the one that is ours.

    Those of torch are no concern: it puts back what it has set.
    """
    while frame is not None and (owner := str(frame.f_globals.get("__name__")).partition(".")[0]) != "collage_neuron":
        if owner != "torch" and any(first <= frame.f_lasti < end for first, end in _tries(frame.f_code)):
            return True
        frame = frame.f_back
    return False


@lru_cache(1024)
def _tries(code: CodeType) -> list[tuple[int, int]]:
    """The offsets of instructions, from the first to the end, whose exceptions some code in `code` handles.

    A `with` handles none, but that of `contextlib.suppress`.
    """
    if "suppress" in code.co_names:
        return [(0, len(code.co_code))]
    found = dis.Bytecode(code)
    names = {each.offset: each.opname for each in found}
    if not hasattr(found, "exception_entries"):  # Python 3.10
        return [(0, len(code.co_code))] if "SETUP_FINALLY" in names.values() else []
    after = dict(zip(names, list(names)[1:], strict=False))
    return [
        (each.start, each.end)
        for each in found.exception_entries
        if names[each.target] == "PUSH_EXC_INFO" and names[after[each.target]] != "WITH_EXCEPT_START"
    ]
