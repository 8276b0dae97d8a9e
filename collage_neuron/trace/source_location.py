"""Finds the source line in a user's `step()` to which an error message points.

This is the innermost line whose module is not torch's, Python's or ours; of an optimizer of torch, that in torch.optim.
"""

from __future__ import annotations

import sys
import traceback
from functools import lru_cache
from types import FrameType

from collage_neuron.passes.functionalize.recorded_ops import Place

_NOBODYS = sys.stdlib_module_names | {"torch", "torch_xla", "collage_neuron"}


def here() -> Place | None:
    """The place of the call."""
    found = _Search()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not found.ends_at(frame, frame.f_lineno):
        frame = frame.f_back
    return found.place


def raised_at(error: BaseException) -> Place | None:
    """The place where `error`, which has just been caught, was raised."""
    found = _Search()
    any(found.ends_at(*frame) for frame in reversed(list(traceback.walk_tb(error.__traceback__))))
    return found.place


class _Search:
    """Looks at frames from the innermost on."""

    def __init__(self) -> None:
        self.place: Place | None = None

    def ends_at(self, frame: FrameType, line: int) -> bool:
        """Returns True if the place is in `frame`, so that the frames around it need no look."""
        owner = _owner(str(frame.f_globals.get("__name__", "")))
        if owner == "user" or (owner == "torch.optim" and self.place is None):
            self.place = Place(frame.f_code.co_filename, line)
        return owner == "user" or (owner == "ours" and self.place is not None)  # beyond it is who calls step()


@lru_cache(4096)  # asked for several frames of each operation that is recorded
def _owner(module: str) -> str:
    if module.partition(".")[0] not in _NOBODYS:
        return "user"
    if module.startswith("torch.optim."):
        return "torch.optim"
    return "ours" if module.startswith("collage_neuron.") else "nobody"
