"""The environment variable that overrides the strategy of `compile`, so that an unchanged script runs under another."""

from __future__ import annotations

import logging
import os

from collage_neuron.numerics.strategies import STRATEGIES, StrategyLike

VARIABLE = "COLLAGE_STRATEGY"
"""Its value is the name of a strategy; unset or empty, `compile` does what it is told."""

log = logging.getLogger("collage_neuron")


def overridden(strategy: StrategyLike | None, budget: int | None) -> tuple[StrategyLike | None, int | None]:
    """The strategy and the bytes that `compile` goes by: those it was given, or the strategy of the variable.

    Each override is a line in the log `collage_neuron`, level WARNING, which Python prints unless it is told not to.

    Raises:
        ValueError: the variable names no strategy.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return strategy, budget
    if name not in STRATEGIES:
        raise ValueError(
            f"{VARIABLE} is {name!r}; set it to one of {', '.join(STRATEGIES)}, or unset it; one of your own has to be "
            "registered before compile (collage_neuron.extend.STRATEGIES)"
        )
    given = f"bytes={budget}" if budget is not None else f"strategy={strategy!r}"
    log.warning("%s; compile was given %s", line_of(name), given)
    return name, None


def line_of(strategy: str) -> str:
    """How the line of the log begins, by which `compare` knows that the variable was read."""
    return f"{VARIABLE}={strategy} overrides the strategy"
