"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_logs import Write


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def writer(name: str, *lines: object, end: str = "\n") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + end)
        return path

    return writer


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where the figure goes
    return tmp_path / "mine.py"
