"""A wider state dict that is loaded into a compiled model: its weights are rounded, and a warning says so."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from loading_cases import adamw, compiled
from models import mlp, train
from torch.optim import AdamW

import collage_neuron
from collage_neuron import RoundedWeights, checkpoint, exact_value
from collage_neuron.conversion import loaded_weights
from collage_neuron.states.live_objects import outermost

KEPT = r"0\.weight and \d other weights of this state dict are rounded to bf16 .* low words start at zero. To keep them"


def widened(seed: int = 1) -> dict[str, torch.Tensor]:
    return copy.deepcopy(mlp(seed).state_dict())


def in_form(form: str) -> torch.nn.Module:
    if form == "optimizer":
        collage_neuron.compile(adamw(model := mlp()))
        return model
    return collage_neuron.compile(mlp()) if form == "model" else compiled()[0]


@pytest.mark.parametrize("form", ["both", "model", "optimizer", "copied", "pickled"])
def test_a_warning_names_weights_that_are_rounded_as_they_are_loaded(form: str) -> None:
    model = in_form(form)
    model = {"copied": copy.deepcopy, "pickled": lambda m: pickle.loads(pickle.dumps(m))}.get(form, lambda m: m)(model)
    keys = list(model.state_dict())
    with pytest.warns(RoundedWeights, match=KEPT) as told:
        model.load_state_dict(widened())
    assert len(told) == 1
    assert told[0].filename == __file__
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_that_bf16_cannot_hold_are_named_too(dtype: torch.dtype) -> None:
    model, _ = compiled()
    with pytest.warns(RoundedWeights, match=KEPT):
        model.load_state_dict({name: t.to(dtype) for name, t in widened().items()})


def test_the_warning_comes_through_wrappers_once() -> None:
    """As DDP and `torch.compile` wrap a model: in theirs, names have a prefix."""
    model, _ = compiled()
    outer = torch.nn.ModuleDict({"module": model})
    with pytest.warns(RoundedWeights, match=r"^module\.0\.weight and \d other weights") as told:
        outer.load_state_dict({f"module.{name}": t for name, t in widened().items()})
    assert len(told) == 1


def test_a_module_of_the_model_that_is_loaded_alone_warns_too() -> None:
    model, _ = compiled()
    inner: Any = next(model.children())
    with pytest.warns(RoundedWeights, match=r"^weight and 1 other weights of .* into this Linear") as told:
        inner.load_state_dict(next(mlp(1).children()).state_dict())
    assert len(told) == 1


def test_what_loses_nothing_is_loaded_without_a_word() -> None:
    model, optimizer = compiled()
    weights = widened()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({name: t.bfloat16().float() for name, t in weights.items()})
        model.load_state_dict({name: t.bfloat16() for name, t in weights.items()}, assign=False)
        plain = mlp(1)
        train(plain, (plains := adamw(plain)), range(2))
        saved = plain.state_dict()
        checkpoint.set_fp32_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=plains.state_dict())
        frozen, head = mlp().requires_grad_(False), torch.nn.Linear(1, 1)
        collage_neuron.compile(torch.nn.Sequential(frozen, head), adamw(head))
        frozen.load_state_dict(weights)  # frozen weights are cast as by `model.to`


def test_set_fp32_state_dict_keeps_what_the_warning_says_is_lost() -> None:
    model, optimizer = compiled()
    plain = mlp(1)
    train(plain, (plains := adamw(plain)), range(2))
    with pytest.warns(RoundedWeights, match="set_fp32_state_dict"):
        model.load_state_dict(plain.state_dict())
    train(model, optimizer, [9])  # the step that begins from rounded weights
    saved = plain.state_dict()
    checkpoint.set_fp32_state_dict(model, optimizer, model_state_dict=saved, optim_state_dict=plains.state_dict())
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), q.detach(), rtol=2**-17, atol=0)


def loaded(model: torch.nn.Module) -> list[str]:
    """The warnings of weights in fp32 that are loaded into a model."""
    wide = {name: t.float() + 2**-20 for name, t in model.state_dict().items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.load_state_dict(wide)
    return [str(w.message) for w in told]


def test_models_are_looked_for_once_for_all_optimizers_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for steps in hooks of gradients: to look among all objects of a process takes a tenth of a second."""
    searches = list[int]()

    def search(held: set[int]) -> list[torch.nn.Module]:
        searches.append(len(held))
        return outermost(held)

    monkeypatch.setattr(loaded_weights, "outermost", search)
    model = mlp().bfloat16()
    for p in model.parameters():
        collage_neuron.compile(AdamW([p]))
    assert searches == [1]
    told = loaded(model)
    assert [text.split()[0] for text in told] == [name for name in model.state_dict() if name.endswith("weight")]


def test_a_part_that_is_a_script_is_compiled_and_says_nothing() -> None:
    """It takes no hooks."""
    model = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(8, 4)), torch.nn.Linear(4, 2))
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=0.1), verbose=False)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    before = [exact_value(optimizer, p) for p in model.parameters()]
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    after = [exact_value(optimizer, p) for p in model.parameters()]
    assert not any(map(torch.equal, before, after))
