"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from compared_scripts import SCRIPT
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
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)  # where the figure goes
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path
