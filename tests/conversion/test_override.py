"""COLLAGE_STRATEGY: what `compile` is told is overridden, and the log says so each time."""

from __future__ import annotations

import logging

import pytest
import torch

import collage_neuron


def strategy_of(caplog: pytest.LogCaptureFixture, **settings: object) -> object:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with caplog.at_level(logging.WARNING, "collage_neuron"):
        collage_neuron.compile(model, optimizer, **settings)  # type: ignore[call-overload]  # settings of each test
    return optimizer.param_groups[0]["collage_strategy"]


@pytest.mark.parametrize("settings", [{}, {"strategy": "plus"}, {"bytes": 12}, {"strategy": {"*": "bf16"}}])
def test_the_variable_overrides_what_compile_is_given_and_one_line_says_so(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "light")
    assert strategy_of(caplog, **settings) == "light"
    (line,) = [record.getMessage() for record in caplog.records if "COLLAGE_STRATEGY" in record.getMessage()]
    given = f"bytes={settings['bytes']}" if "bytes" in settings else f"strategy={settings.get('strategy')!r}"
    assert line == f"COLLAGE_STRATEGY=light overrides the strategy; compile was given {given}"


@pytest.mark.parametrize("unset", [None, ""])
def test_without_it_nothing_changes(
    unset: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("COLLAGE_STRATEGY", raising=False)
    if unset is not None:
        monkeypatch.setenv("COLLAGE_STRATEGY", unset)
    assert strategy_of(caplog, strategy="full") == "full"
    assert not caplog.records


def test_an_unknown_strategy_is_rejected(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "plsu")
    with pytest.raises(ValueError, match=r"COLLAGE_STRATEGY is 'plsu'; set it to one of bf16, .*, or unset it"):
        strategy_of(caplog)


def test_classes_are_overridden_too(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "full")
    with caplog.at_level(logging.WARNING, "collage_neuron"):
        compiled = collage_neuron.compile(torch.optim.AdamW)
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert compiled([p]).param_groups[0]["collage_strategy"] == "full"
