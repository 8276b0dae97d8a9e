"""After its first step an optimizer says once, in one line, what was compiled; `explain` ends in the same line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import compile_forms
import pytest
import torch
from models import mlp, train
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.passes.backends import registry

BACKEND = registry.choose("auto", torch.device("cpu")).name

FORMS: dict[str, Callable[..., Optimizer]] = {
    **compile_forms.FORMS,
    "(class)": lambda model, **settings: collage_neuron.compile(AdamW, **settings)(model.bfloat16().parameters()),
}


def made(form: str = "(model, optimizer)", **settings: Any) -> tuple[torch.nn.Module, Optimizer]:
    model = mlp(0)
    return model, FORMS[form](model, **settings)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_it_once_and_a_word_silences_it(form: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "collage_neuron")
    train(*made(form, verbose=False), [0])
    assert lines(caplog) == []
    model, optimizer = made(form)
    train(model, optimizer, range(3))
    elements = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    (line,) = lines(caplog)
    assert line == (
        f"AdamW: {tensors} tensors, {elements:,} parameters, strategy split433, 12 B each, "
        f"{12 * elements / 1e3:.3g} kB instead of {16 * elements / 1e3:.3g} kB with fp32; backend {BACKEND}"
    )
    assert collage_neuron.explain(optimizer).splitlines()[-1] == line
    with pytest.warns(collage_neuron.StrategyChanged):
        collage_neuron.compile(optimizer, strategy="fp32")
    train(model, optimizer, [0])
    assert "fp32, 16 B each" in lines(caplog)[1]
    assert "instead of" not in lines(caplog)[1]


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("3", 0)])
def test_one_process_of_a_run_says_it(
    rank: str, said: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collage_neuron")
    monkeypatch.setenv("RANK", rank)
    train(*made(), [0])
    assert len(lines(caplog)) == said


def test_a_setting_that_is_none_is_rejected() -> None:
    with pytest.raises(ValueError, match="verbose is 'no'; give True or False"):
        made("(class)", verbose="no")


def test_graphs_are_shown_on_request() -> None:
    _, optimizer = made()
    table, whole = collage_neuron.explain(optimizer), collage_neuron.explain(optimizer, graphs=True)
    assert "captured update" not in table
    assert "captured update" in whole
    assert [line for line in table.splitlines() if line not in whole.splitlines()] == []
    (total,) = (line for line in table.splitlines() if line.startswith("  total"))
    sizes = [float(line.split()[-2]) for line in table.splitlines() if line.endswith(" MB") and line != total]
    assert float(total.split()[-2]) == pytest.approx(sum(sizes), abs=0.001 * len(sizes))


def test_a_missing_compiler_is_said_by_auto(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    native = registry.get("native")
    monkeypatch.setattr(type(native), "missing", lambda self: "llvmlite is not installed: pip install it")
    monkeypatch.setattr(type(native), "suits", lambda self, device: False)
    caplog.set_level(logging.INFO, "collage_neuron")
    train(*made("(optimizer)"), [0])
    (line,) = lines(caplog)
    assert line.endswith("backend reference (not native, which is faster: llvmlite is not installed: pip install it)")
