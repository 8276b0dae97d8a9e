"""The table of a GPT trained with Muon and AdamW is the stored one, and its optimizers run as the page says."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import muon_gpt
import pytest
import torch
from gpt import GPT, Shape

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping

PAGE = (Path(__file__).parents[2] / "docs" / "as_written.md").read_text()
RECORDS = json.loads(muon_gpt.RECORDS.read_text())
SMALL = Shape(batch=2, block=8, width=16, heads=2, layers=1)


def test_the_page_has_the_stored_table() -> None:
    assert muon_gpt.table(RECORDS) in PAGE
    assert list(RECORDS) == list(muon_gpt.CONTENDERS)


def test_compiled_ones_lose_less_than_bf16_does() -> None:
    loss = {name: fmean(run["loss"] for run in runs) for name, runs in RECORDS.items()}
    assert max(loss["plus"], loss["split433"]) - loss["fp32"] < (loss["bf16"] - loss["fp32"]) / 2


def test_muon_runs_as_written_and_adamw_is_captured() -> None:
    model = GPT(SMALL).bfloat16()
    muon, adamw = (collage_neuron.compile(o, strategy="split433") for o in muon_gpt.optimizers(model))
    assert {id(p) for o in (muon, adamw) for p in o.param_groups[0]["params"]} == set(map(id, model.parameters()))
    muon_gpt.loss_of(model, torch.randint(0, 256, (2, 9))).backward()
    muon.step()
    adamw.step()
    assert bookkeeping(muon).as_written
    assert not bookkeeping(adamw).as_written


@pytest.mark.parametrize("name", ["fp32", "plus"])
def test_a_run_has_the_bytes_of_the_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_gpt, "HELD_OUT", 1)
    run = muon_gpt.train(name, 0, steps=2, shape=SMALL)
    assert run["bytes"] == pytest.approx(RECORDS[name][0]["bytes"])
    assert 0 < run["loss"] < 7
