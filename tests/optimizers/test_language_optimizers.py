"""The 17 optimizers that language models are trained with: each runs as docs/development/coverage.md says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from language_cases import AS_WRITTEN, CASES, how, trained
from nki_standin import load

import collage_neuron

pytestmark = [
    pytest.mark.filterwarnings("ignore:This overload of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer"),
]


DOCS = Path(__file__).parents[2] / "docs"
measured = load(DOCS / "measure_optimizers.py")
RECORDS = measured.stored()


@pytest.mark.parametrize("name", CASES)
def test_each_runs_as_the_page_says(name: str) -> None:
    case = CASES[name]
    optimizer, found = trained(case, torch.bfloat16, 3, "fp32")
    assert how(optimizer) == case.runs == RECORDS[name]["runs"]
    assert bool(case.reason) == (case.runs == AS_WRITTEN)
    own, plain = trained(case, torch.float32, 3)
    if case.runs == AS_WRITTEN:
        assert all(map(torch.equal, found, plain))
    else:  # the rounding of an update, and of the parameter: 0.1 is larger than any
        assert all((x - y).abs().max() <= 3 * 2**-23 * 0.1 for x, y in zip(found, plain, strict=True))
    assert measured._bytes(own) >= collage_neuron.bytes_per_parameter(optimizer) - 0.1


def test_at_least_fifteen_are_right() -> None:
    assert list(RECORDS) == list(CASES)
    assert sum(map(measured.is_right, RECORDS.values())) >= 15
    assert all(measured.best(record)[0] in measured.CANDIDATES for record in RECORDS.values())


def test_every_one_is_nearer_than_bf16() -> None:
    assert [name for name, record in RECORDS.items() if record["full"][0] >= record["bf16"][0] / 10] == []


@pytest.mark.sampled(of=3, each=False)  # beside "split433", `test_each_runs_as_the_page_says` has each
@pytest.mark.parametrize("name", CASES)
def test_every_one_has_as_many_bytes_as_the_page_says(name: str) -> None:
    record = RECORDS[name]
    optimizer, _ = trained(CASES[name], torch.bfloat16, 2, "split433")
    assert abs(collage_neuron.bytes_per_parameter(optimizer) - record["split433"][1]) < 0.05
