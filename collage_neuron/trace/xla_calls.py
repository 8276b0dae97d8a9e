"""Functions that a step calls on XLA, seen before torch sees them: what waits is computed where its class is too late.

torch lets all of a list that is written alias, or nothing, and would take a placeholder there for a tensor of
torch_xla's: the process would end. What has an `out` of torch_xla's would put a placeholder into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collage_neuron.trace.placeholders import compute_all, has_xla, waits


class SeenBefore(TorchFunctionMode):
    """A mode in which no function writes to a list of what waits and what does not, nor what waits to an `out`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function."""
        given = kwargs or {}
        has_own_out = "out" in given and has_xla([given["out"]], {})
        if has_own_out or (is_named_as_writing(func) and any(map(_is_mixed, (*args, *given.values())))):
            compute_all()
        return func(*args, **given)


def is_named_as_writing(func: Any) -> bool:
    """Returns True for what says by its name that it writes to its first argument: `add_`, or an overload of that."""
    name = getattr(func, "__name__", "").split(".")[0]
    return bool(name.endswith("_") and not name.endswith("__"))


def _is_mixed(given: Any) -> bool:
    on_xla = (x for x in given if isinstance(x, torch.Tensor) and x.device.type == "xla") if _is_list(given) else ()
    return len({*map(waits, on_xla)}) == 2


def _is_list(given: Any) -> bool:
    return isinstance(given, (list, tuple))
