"""Functions that a step calls on XLA, seen before torch sees them: what waits is computed where its class is too late.

torch lets all of a list that is written alias, or nothing, and would take a placeholder there for a tensor of
torch_xla's: the process would end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collage_neuron.trace.placeholders import compute_all, waits


class SeenBefore(TorchFunctionMode):
    """A mode in which no function writes to a list of what waits and what does not."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function."""
        given = kwargs or {}
        is_written = "out" in given or getattr(func, "__name__", "").endswith("_")
        if is_written and any(map(_is_mixed, (*args, *given.values()))):
            compute_all()
        return func(*args, **given)


def _is_mixed(given: Any) -> bool:
    return isinstance(given, (list, tuple)) and len({*map(waits, _on_xla(given))}) == 2


def _on_xla(given: Iterable[Any]) -> Iterable[torch.Tensor]:
    return (x for x in given if isinstance(x, torch.Tensor) and x.device.type == "xla")
