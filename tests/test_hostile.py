"""Optimizers and loops written to fool the compiler: equal to float64 within the format, or rejected in words."""

from __future__ import annotations

import hostile
import hostile_by_readers
import pytest

MODULES = (hostile_by_readers,)


@pytest.mark.parametrize("strategy", hostile.TOLERANCES)
@pytest.mark.parametrize("name", hostile.CASES)
def test_none_is_silently_wrong(name: str, strategy: str) -> None:
    outcome = hostile.play(hostile.CASES[name], strategy)
    assert not outcome.is_silently_wrong(strategy), outcome
    assert outcome.rejection is None or len(str(outcome.rejection)) > 40, outcome
