"""A pytest plugin: in the files that are run, CPU parameters are updated by `numpy_backend`; says how often."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from numpy_backend import NumPy

from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.registry import register


class Counted(NumPy):
    """Counts the steps that it takes."""

    steps = 0

    def run(self, launches: Sequence[Launch]) -> tuple[()]:
        self.steps += 1
        return super().run(launches)


BACKEND = Counted()


def pytest_configure() -> None:
    register(BACKEND)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"steps on the backend {BACKEND.name}: {BACKEND.steps}")
