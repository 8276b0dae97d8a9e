"""`Recording`: what a step does to a parameter: the update, its numbers, and those that it leaves in the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from collage_neuron.passes.ir.update import Captured


@dataclass(frozen=True)
class Recording:
    """One recorded step: the update, its numbers, and the host scalars after the step."""

    captured: Captured
    slots: list[float]
    """The numbers; where parameters of a job have numbers of their own, those of the first."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Host scalars of the parameter's state after the step (`step`, ...)."""
    by_shape: bool = False
    """True if parameters of other shapes may have other updates."""
    following: Recording | None = None
    """The step after, if this one makes a state of the gradient and does not show what becomes of it."""
    kind: Any = None
    """The calls of the step that was recorded (`trace.kinds.Kind`), and their numbers, with which it is validated."""
    numbers: Sequence[float] = ()
    followed: Any = None
    """What computes the numbers of later steps that are like it (`trace.scalar_program.Followed`), if that is known."""
    rows: Sequence[list[float]] = ()
    """The slots of each parameter of a job, in its order, where they have numbers of their own."""

    def again(self, slots: list[float], scalars: dict[str, Any], numbers: Sequence[float], followed: Any) -> Recording:
        """That of a step with other numbers; `dataclasses.replace` takes three times as long, in each step."""
        return Recording(self.captured, slots, scalars, self.by_shape, self.following, self.kind, numbers, followed)

    def of(self, places: Sequence[int]) -> Recording:
        """That of some parameters of a job, by their places there."""
        if not self.rows:
            return self
        rows = [self.rows[i] for i in places]
        return replace(self, slots=rows[0], rows=rows if len(rows) > 1 else ())
