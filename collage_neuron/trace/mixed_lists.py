"""Lists that a step writes on XLA, of tensors that wait and of torch_xla's own: what waits is computed before.

torch lets all of a written list alias or nothing, before it asks the class of any, and would take a placeholder for a
tensor of torch_xla's: the process would end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collage_neuron.trace.placeholders import compute_all, waits


class Unmixed(TorchFunctionMode):
    """A mode in which no function writes to such a list."""

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
