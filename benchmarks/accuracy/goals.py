"""The errors that the strategies of each byte count may have at most; checked by the page and by the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LARGE_STEPS = ("recipe", "t2", "rows", ".9999", "10k")
SMALL_STEPS = ("1e-6",)

Errors = Mapping[str, float]
"""The worst error over seeds, by condition."""


@dataclass(frozen=True)
class Goal:
    """The bound on the error of a strategy in some conditions."""

    strategy: str
    bytes: int
    """Bytes per parameter of weights and states, without the scales of blocks."""
    bound: float
    conditions: tuple[str, ...] = LARGE_STEPS

    def worst(self, errors: Errors) -> tuple[float, str]:
        """The largest of the errors in these conditions, and the condition; those that did not run are left out."""
        return max(((errors[name], name) for name in self.conditions if name in errors), default=(float("nan"), ""))


GOALS = (
    Goal("split444", 12, 1e-5),
    Goal("split433", 10, 5e-5),
    Goal("split423", 9, 1.5e-4),
    Goal("split323", 8, 8e-4),
    Goal("split422", 8, 1.5e-3, (*LARGE_STEPS, "1e-5", "1e-6")),
    Goal("split322", 7, 2e-3),
    Goal("split312", 6, 4e-2),
    Goal("split311", 5, 8e-2),
    Goal("split444", 12, 1.5e-4, SMALL_STEPS),
    Goal("split433", 10, 1.5e-4, SMALL_STEPS),
    Goal("split423", 9, 1.5e-4, SMALL_STEPS),
)
"""At 8 bytes there are two strategies: one for large learning rates, and one for all."""
