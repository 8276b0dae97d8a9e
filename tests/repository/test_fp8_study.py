"""The study of training in fp8: its oracle of torchao's recipe, a quick run, and the page."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from fp8 import figure, jobs, page
from fp8.just_in_time import JustInTime, cast
from fp8.page import WAYS
from fp8.readings import PARTS
from fp8.training import Run, train
from fp8.trainium import gains

ROOT = Path(__file__).parents[2]
TINY = Run("bf16", steps=4, batch=2, block=8, width=32, depth=1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cast_by_the_largest_magnitude_fills_the_range(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0, -1.5, 1e-3, 0.0]).bfloat16()
    found = cast(x, dtype)
    assert float(found[0]) == pytest.approx(3, rel=2**-22)  # the largest is a number of the type
    assert bool(((found - x).abs() <= x.abs() * 2.0 ** -(4 if "e4m3" in str(dtype) else 3)).all())
    assert torch.equal(cast(torch.zeros(3), dtype), torch.zeros(3))


def test_the_layers_of_amax_are_a_linear_layer_of_cast_values() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(n, m, generator=generator).bfloat16() for n, m in ((6, 8), (4, 8), (6, 4)))
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    apply = JustInTime.apply
    y = apply(*leaves, None)  # type: ignore[no-untyped-call]  # of torch
    y.backward(g)
    qx, qw, qg = (cast(a, t).double() for a, t in ((x, jobs_dtype(0)), (w, jobs_dtype(0)), (g, jobs_dtype(1))))
    for found, wanted in zip((y, leaves[0].grad, leaves[1].grad), (qx @ qw.t(), qg @ qw, qg.t() @ qx), strict=True):
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-12)  # rounded to bf16 once


def jobs_dtype(gradient: int) -> torch.dtype:
    return (torch.float8_e4m3fn, torch.float8_e5m2)[gradient]


def test_ways_differ_only_in_their_matmuls() -> None:
    """Before any step the losses of all ways are as near as roundings to 8 bits; frozen layers are those of bf16."""
    found = {way: train(replace(TINY, way=way, steps=1))["loss"] for way in WAYS}
    assert found["frozen"] == pytest.approx(found["bf16"], abs=2**-6)
    assert max(found.values()) - min(found.values()) < 2**-4


def test_every_record_beside_the_page_is_of_a_planned_run() -> None:
    """So that the page shows it, and the study can be resumed from a fresh clone."""
    planned = list(jobs.plan(quick=False))
    assert len(set(planned)) == len(planned)
    records = json.loads((ROOT / "docs" / "development" / "fp8" / "records.json").read_text())
    assert {Run(**{field.name: r[field.name] for field in fields(Run)}) for r in records} <= set(planned)


def test_the_page_shows_the_records_beside_it() -> None:
    records = json.loads((ROOT / "docs" / "development" / "fp8" / "records.json").read_text())
    text = (ROOT / "docs" / "development" / "fp8.md").read_text()
    shown = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert page.tables(records, list(jobs.plan(quick=False))).split("\n\n")[1:] == shown.strip().split("\n\n")[1:]
    assert text.partition(page.GAINS)[2].partition(page.END)[0].strip() == gains()
    assert figure.draw(records) == (ROOT / "docs" / "development" / "fp8" / "losses.svg").read_text()
    assert any(part.has(r) for part in PARTS for r in records)
