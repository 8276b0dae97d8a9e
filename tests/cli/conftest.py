"""Fixtures of the tests of commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]
"""Writes a log: its name, and its lines."""

SCRIPT = """
import random, sys
import torch
from torch import nn

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 4

def make():
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    shift = random.random()

    def loss():
        x = torch.randn(8, WIDTH, dtype=next(model.parameters()).dtype)
        return (model(x).float() - x.float().sum(1, keepdim=True) - shift).square().mean()

    return model, optimizer, loss, scheduler
"""
"""A script that `compare` trains in one process."""


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
