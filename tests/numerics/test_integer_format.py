"""A format with an integer word, added from outside: it trains, is saved and loaded, and no pass was touched.

The package's own integer words are in test_split_words.py and test_split_strategies.py.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import initial, stepped
from exact import update_of
from integer_words import BF16_INT8
from models import differences, snapshot
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.strategies import STRATEGIES, Strategy
from collage_neuron.passes.backends import registry

pytestmark = pytest.mark.usefixtures("rejecting")

NAME = BF16_INT8.name

B, I8 = torch.bfloat16, torch.int8


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, BF16_INT8)
    monkeypatch.setitem(STRATEGIES, NAME, Strategy(NAME, NAME, NAME, NAME))


def adamw(device: str | torch.device = "cpu", **settings: Any) -> tuple[Optimizer, nn.Parameter]:
    p = nn.Parameter(initial().to(device))
    return collage_neuron.compile(AdamW([p], lr=1e-2, weight_decay=0.1), strategy=NAME, **settings), p


def stored(optimizer: Optimizer, p: nn.Parameter) -> dict[str, torch.dtype]:
    return {key: t.dtype for key, t in optimizer.state[p].items() if t.dim() > 0}


WORDS = {"param_lo": I8, "exp_avg": B, "exp_avg_lo": I8, "exp_avg_sq": B, "exp_avg_sq_lo": I8}


def test_it_is_an_entry_of_a_table() -> None:
    optimizer, p = adamw()
    stepped(optimizer, 3)
    assert stored(optimizer, p) == WORDS
    assert collage_neuron.bytes_per_parameter(optimizer) == 2 + 3 * 3
    assert f"exp_avg            {NAME}" in collage_neuron.explain(optimizer)


def test_a_run_goes_on_bit_for_bit_from_a_state_dict(tmp_path: Path) -> None:
    """Through a file; torch casts what it loads to the dtype of the parameter, integers too."""
    optimizer, p = adamw()
    stepped(optimizer, 3)
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other, q = adamw()
    with torch.no_grad():
        q.copy_(saved["p"])
    other.load_state_dict(saved["optimizer"])
    assert stored(other, q) == WORDS
    assert differences(snapshot(stepped(other, seed=1)), snapshot(stepped(optimizer, seed=1))) == []


def test_an_integer_that_is_no_word_of_a_state_is_rejected() -> None:
    optimizer, _ = adamw()
    stepped(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to(torch.int8)
    other, _ = adamw()
    with pytest.raises(ValueError, match=r"\['exp_avg'\] is torch.int8; states are floating-point"):
        other.load_state_dict(saved)


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> str:
    """The format with a second word that 32 elements would share: it is data, and nothing can lay it out yet."""
    word, part = BF16_INT8.components
    shared = (word, replace(part, layout="a block of 32"))
    monkeypatch.setitem(FORMATS, "blocks", replace(BF16_INT8, name="blocks", components=shared))
    return "blocks"


@pytest.mark.parametrize("name", registry.names())
def test_a_backend_says_which_layouts_it_has(name: str, blocks: str) -> None:
    update = update_of(["param"], lambda x: [x])
    backend = registry.get(name)
    assert backend.supports(replace(update, formats={"param": BF16_INT8})) is None
    reason = backend.supports(replace(update, formats={"param": FORMATS[blocks]}))
    assert reason is not None
    assert re.search(r"lay words out as a block of 32 yet; use backend=", reason)


def test_a_layout_that_no_backend_has_is_rejected_before_anything_changes(blocks: str) -> None:
    p = nn.Parameter(initial())
    optimizer = AdamW([p])
    backend = registry.choose("auto", p.device).name
    with pytest.raises(UnsupportedUpdate, match=f"backend '{backend}' does not lay words out as a block of 32 yet"):
        collage_neuron.compile(optimizer, strategy={"exp_avg": blocks})
    assert type(optimizer) is AdamW
    assert not optimizer.state
