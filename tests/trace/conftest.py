"""What the tests of traced steps share."""

from __future__ import annotations

import pytest

from collage_neuron.optimizer.step import TRACE
from collage_neuron.torch_privates import can_withhold

collect_ignore_glob = [] if can_withhold() else ["test_*.py"]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced."""
    monkeypatch.setenv(TRACE, "on")
