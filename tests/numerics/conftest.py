"""Fixtures of the tests of numerics."""

from __future__ import annotations

import pytest
from eft_runs import Run
from exact import on_reference, on_xla


@pytest.fixture(params=["reference", "xla"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "reference":
        return on_reference
    request.getfixturevalue("xla")
    return on_xla
