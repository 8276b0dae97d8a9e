"""What the tests of traced steps share."""

from __future__ import annotations

import pytest

from collage_neuron.trace.recorded_classes import TRACE


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced."""
    monkeypatch.setenv(TRACE, "on")
