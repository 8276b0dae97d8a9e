"""`Recording`: what a step does to a parameter: the update, its numbers, and those that it leaves in the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from collage_neuron.passes.ir.update import Captured


@dataclass(frozen=True)
class Recording:
    """One recorded step: the update, its numbers, and the host scalars after the step."""

    captured: Captured
    slots: list[float]
    scalars: dict[str, Any] = field(default_factory=dict)
    """Host scalars of the parameter's state after the step (`step`, ...)."""
    by_shape: bool = False
    """True if parameters of other shapes may have other updates."""
    following: Recording | None = None
    """The step after, if this one makes a state of the gradient and does not show what becomes of it."""
    kind: Any = None
    """The calls of the step that was recorded (`trace.kinds.Kind`), and their numbers, with which it is validated."""
    numbers: Sequence[float] = ()
