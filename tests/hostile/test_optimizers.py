"""Optimizers and loops written to fool the compiler: equal to float64 within the format, or rejected in words."""

from __future__ import annotations

import hostile
import hostile_by_readers
import pytest
import strangers
from hostile_checks import WITHOUT, removal_of

pytestmark = pytest.mark.usefixtures("rejecting")

MODULES = (hostile_by_readers, strangers)


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("strategy", ["fp32", "plus"])
@pytest.mark.parametrize("name", hostile.CASES)
def test_none_is_silently_wrong(name: str, strategy: str) -> None:
    outcome = hostile.play(hostile.CASES[name], strategy)
    assert not outcome.is_silently_wrong(strategy), outcome
    assert outcome.rejection is None or len(str(outcome.rejection)) > 40, outcome


@pytest.mark.mutants
@pytest.mark.parametrize("name", [name for name in hostile.CASES if name not in WITHOUT])
def test_each_is_wrong_without_the_check_that_serves_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silently, or in an error that is no sentence of ours. Without validation, which would notice most."""
    removal_of(name)(monkeypatch)
    strategy = "light" if name == "CountsInIntegers" else "full"  # a pair counts further than 60 steps go
    try:
        outcome = hostile.play(hostile.CASES[name], strategy, validate="off")
    except Exception:  # an error of torch's or Python's
        return
    assert outcome.is_silently_wrong(strategy) or outcome.error != outcome.error, outcome
