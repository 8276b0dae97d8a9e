"""The accuracy command's machinery: its oracle, bytes, and the stored page."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from accuracy import command, contenders, front, page, table
from accuracy.conditions import CONDITIONS, TUNING, Condition, Stream
from accuracy.exact import exact
from accuracy.flash_adamw import decode_first, decode_second, decode_weight, encode_first, encode_second, encode_weight
from accuracy.goals import GOALS
from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from collage_neuron import STRATEGIES
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.strategies import BY_ACCURACY

OWN = {c.name: c for c in contenders.own()}


@pytest.mark.parametrize("condition", CONDITIONS.values(), ids=CONDITIONS)
def test_the_oracle_takes_the_steps_of_torch_in_float64(condition: Condition) -> None:
    """torch.optim.AdamW on float64 tensors, with a scheduler of its own for the cosine."""
    steps, stream = 25, Stream(condition, TUNING[:1])
    p = Parameter(stream.start.double())
    optimizer = AdamW([p], condition.lr, condition.betas, condition.eps, condition.weight_decay, foreach=False)
    factor = LambdaLR(optimizer, lambda t: condition.rate(min(t, steps - 1), steps) / condition.lr)
    for g in stream.gradients(steps):
        p.grad = g.double()
        optimizer.step()
        factor.step()
    found = exact(Stream(condition, TUNING[:1]), steps)
    assert found.errors(p.detach())[0] < 2**-30  # of float64, as a fraction of a short distance
    assert found.errors(p.detach() + 2**-10)[0] > 2**-10


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bytes_are_those_of_the_formats(name: str) -> None:
    s = STRATEGIES[name]
    words = sum(FORMATS[fmt].bytes for fmt in (s.param, s.state, s.slow))
    found = contenders.run(OWN[name], Stream(CONDITIONS["recipe"], (0,)), 2).bytes
    assert words <= found <= words + 3 * front.PER_SCALE


def stored_rows() -> list[table.Row]:
    return table.rows(json.loads((command.DOCS / "accuracy" / "records.json").read_text()))


def test_the_stored_errors_meet_every_goal_but_the_one_that_is_explained() -> None:
    verdicts = {goal: page.verdict(goal, measured) for goal, measured in front.goals(stored_rows())}
    assert len(verdicts) == len(GOALS)
    missed = {goal.strategy: verdict for goal, verdict in verdicts.items() if verdict != "met"}
    assert missed == {"split311": "**missed**"}


def test_the_page_has_every_contender_in_every_condition() -> None:
    for row in stored_rows():
        assert row.errors.keys() == CONDITIONS.keys()
        assert all(math.isfinite(x) for errors in row.errors.values() for x in errors)
    assert {row.name for row in stored_rows()} >= OWN.keys()


def test_bytes_takes_strategies_in_the_order_of_the_stored_errors() -> None:
    assert [name for name in front.by_accuracy(stored_rows()) if name in BY_ACCURACY] == list(BY_ACCURACY)


def test_the_words_of_the_port_read_back() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-2
    assert ((decode_weight(*encode_weight(x)) - x).abs() <= x.abs() * 2**-8 / 127 * 1.01).all()
    for encode, decode, y in ((encode_first, decode_first, x), (encode_second, decode_second, x * x)):
        groups, found = (z.view(-1, 32) for z in (y, decode(*encode(y))))
        assert ((found - groups).abs().amax(1) <= groups.abs().amax(1) * 2**-6).all()
        assert not torch.equal(found, groups)


def test_the_figures_are_those_of_the_stored_records(tmp_path: Path) -> None:
    """If this fails: `python benchmarks/accuracy --figures`."""
    stored = command.DOCS / "accuracy"
    (tmp_path / "accuracy").mkdir()
    (tmp_path / "accuracy" / "records.json").write_text((stored / "records.json").read_text())
    page.draw(tmp_path)
    for name in ("error_over_bytes.svg", "error_at_the_recipe.svg"):
        shown, drawn = ((folder / name).read_text() for folder in (stored, tmp_path / "accuracy"))
        assert texts(drawn) == texts(shown)  # places differ in the last digits with the version of matplotlib


def texts(svg: str) -> list[str]:
    return sorted(re.findall(r">([^<>]*\w[^<>]*)</text>", svg))
