"""Averages that other code makes of a compiled model are noticed, and copies that are no averages are not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import swa_utils as torchs

import collage_neuron
from collage_neuron import RoundedAverage, trainers
from collage_neuron.states import coarse_writes

STEPS = 40


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 20))


After = Callable[[nn.Module, nn.Module, int], object]
"""What is done with a copy and the model after a step."""


def pairs(mine: nn.Module, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((a, p.detach().to(a.dtype)) for a, p in zip(mine.parameters(), model.parameters(), strict=True))


def ema(mine: nn.Module, model: nn.Module, step: int) -> None:
    """As timm writes it."""
    with torch.no_grad():
        for a, p in pairs(mine, model):
            a.lerp_(p, 0.001)


def ema_through_data(mine: nn.Module, model: nn.Module, step: int) -> None:
    """As ema_pytorch writes it, which leaves the version of a tensor as it is."""
    for a, p in pairs(mine, model):
        a.data.lerp_(p, 0.1)


def trained(make: Callable[[nn.Module], nn.Module], after: After, first: str, lr: float = 1e-3) -> list[Any]:
    """Trains beside a copy, which is made before or after `compile`; returns the warnings."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=lr)
    mine = make(model) if first == "copied" else None
    collage_neuron.compile(model, optimizer, strategy="split433")
    mine = make(model) if mine is None else mine
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            seed = torch.Generator().manual_seed(step)
            model(torch.randint(0, 20, (8,), generator=seed)).float().square().mean().backward()
            optimizer.step()
            after(mine, model, step)
    return [w.message for w in told if isinstance(w.message, RoundedAverage)]


AVERAGES: dict[str, tuple[Callable[[nn.Module], nn.Module], After]] = {
    "torch's, and Lightning's callbacks": (
        lambda model: torchs.AveragedModel(model, avg_fn=torchs.get_ema_avg_fn(0.999)),
        lambda mine, model, step: mine.update_parameters(model),  # type: ignore[operator]
    ),
    "timm's": (copy.deepcopy, ema),
    "through data": (copy.deepcopy, ema_through_data),
    "in fp32": (lambda model: copy.deepcopy(model).float(), ema),
    "every seventh step": (copy.deepcopy, lambda mine, model, step: ema(mine, model, step) if step % 7 == 0 else None),
}


@pytest.mark.parametrize("first", ["copied", "compiled"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_high_words_is_told_once_with_what_to_use(name: str, first: str) -> None:
    told = trained(*AVERAGES[name], first)
    assert len(told) == 1
    assert "a copy of this Sequential (" in str(told[0])
    assert "Use collage_neuron.AveragedModel(model, optimizer, decay=...), or the callbacks" in str(told[0])
    for callback in ("lightning_average", "hugging_face_average"):
        assert hasattr(trainers, callback)


def test_an_average_that_does_not_move_in_bf16_is_told_too() -> None:
    assert len(trained(copy.deepcopy, ema, "compiled", lr=1e-6)) == 1


class Trained:
    """A second network of the same class that has an optimizer of its own."""

    def __init__(self) -> None:
        self.optimizer: SGD | None = None

    def __call__(self, mine: nn.Module, model: nn.Module, step: int) -> None:
        self.optimizer = self.optimizer or SGD(mine.parameters(), lr=0.1)
        for p in mine.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()


OTHERS: dict[str, After] = {
    # Or the model of a worker that samples.
    "a target network": lambda mine, model, step: step % 3 or mine.load_state_dict(model.state_dict()),
    "a frozen reference": lambda mine, model, step: None,
    "weights of a file": lambda mine, model, step: step == 20 and mine.load_state_dict(network().state_dict()),
    "a second network": Trained(),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_copies_are_not_spoken_of(name: str, wide: bool) -> None:
    make = (lambda model: copy.deepcopy(model).float()) if wide else copy.deepcopy
    assert trained(make, OTHERS[name], "compiled") == []


def test_exact_averages_and_copies_of_exact_values_are_not_spoken_of() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_neuron.compile(model, optimizer, strategy="split433")
    average, exact = collage_neuron.AveragedModel(model, optimizer, decay=0.9), copy.deepcopy(model).float()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.arange(20)).float().square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for a, p in zip(exact.parameters(), model.parameters(), strict=True):
                a.copy_(collage_neuron.exact_value(optimizer, p))


def test_most_steps_look_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = collage_neuron.compile(SGD(params, lr=0.1))

    def copies(held: set[int]) -> list[Any]:
        looks.append(len(held))
        return []

    monkeypatch.setattr(coarse_writes, "copies_of_models", copies)
    monkeypatch.setattr(coarse_writes, "_sample", lambda model: pytest.fail("there is no copy"))
    for _ in range(300):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert looks == [2, 2, 2]  # after 16, 64 and 256 steps
