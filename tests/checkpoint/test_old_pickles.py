"""Runs that earlier commits pickled, when the files of the package lay elsewhere: they load, and go on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models import follow
from nki_standin import load
from torch import nn

import collage_neuron
from collage_neuron.optimizer import Compiled

FOLDER = Path(__file__).parents[1] / "golden" / "pickles"
words = load(FOLDER / "make.py").words
RUNS = [(f, r) for f in ("before_bookkeeping.pt", "flat.pt") for r in ("plus in fp32", "plus in bf16", "fp32 in fp32")]
RUNS += [("old_default.pt", "plus in fp32")]  # compiled without a strategy, when that was `plus`


def loaded(file: str, run: str) -> Any:
    return torch.load(FOLDER / file, weights_only=False)[run]


def later(file: str, run: str) -> list[torch.Tensor]:
    """What the code of then made of a run: of the older one that of `flat.pt`, between which arithmetic was changed."""
    if file != "before_bookkeeping.pt":
        return list(loaded(file, run)["later"])
    return list(torch.load(FOLDER / "before_bookkeeping_later.pt", weights_only=True)[run])


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    alike = len(one) == len(other) and all(a.dtype == b.dtype for a, b in zip(one, other, strict=True))
    return alike and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", ["whole", "copied"])
@pytest.mark.parametrize(("file", "run"), RUNS)
def test_a_run_goes_on_with_the_bits_that_it_would_have_had(file: str, run: str, kind: str) -> None:
    found = loaded(file, run)
    model, optimizer = found[kind]
    assert isinstance(optimizer, Compiled)
    assert same(words(model, optimizer), found["now"])
    follow(optimizer, (3, 4))
    assert same(words(model, optimizer), later(file, run))


@pytest.mark.parametrize("form", ["model and optimizer", "model"])
def test_a_checkpoint_of_the_old_default_resumes_under_it(form: str) -> None:
    """It has the strategy's name: a script that names none still steps as `plus`, and is told so."""
    saved = loaded("old_default.pt", "plus in fp32")
    weights, state = saved["checkpoint"]
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    collage_neuron.compile(*((model,) if form == "model" else (model, optimizer)))
    model.load_state_dict(weights)
    with pytest.warns(UserWarning, match=r"compiled for strategy 'split433'.* goes on with those of .*, 'plus'"):
        optimizer.load_state_dict(state)
    assert same(words(model, optimizer), saved["now"])
    follow(optimizer, (3, 4))
    assert same(words(model, optimizer), saved["later"])
    assert optimizer.param_groups[0]["collage_strategy"] == "plus"
