"""What a recorded step is: the update, its numbers, and what the step did on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collage_neuron.passes.ir.update import Captured


@dataclass(frozen=True)
class Recording:
    """One recorded step: the update, its numbers, and what the step did to the host scalars."""

    captured: Captured
    slots: list[float]
    scalars: dict[str, Any]
    """Host scalars of the parameter's state after the step (`step`, ...)."""
    group: dict[str, Any]
    """Entries of the parameter group that the step changed."""
    attributes: dict[str, Any]
    """Attributes of the optimizer that the step changed: numbers, and lists or dicts of them."""
    host: tuple[str, ...]
    """What else it changed on the host, and a recording does not carry: objects, iterators, globals, generators."""
    asked: frozenset[str]
    """Attributes of the parameter that the step looked at, `shape` too: where they differ, so may recordings."""
