"""Validation compares kernels with a user's step inside the documented domains of a device's functions (stand-in)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import nki_standin
import pytest
import torch
from nki_runs import INFINITY, search_less

import collage_neuron
from collage_neuron.errors import TranslationError
from collage_neuron.passes.backends.nki import calls, custom_op, source_cache
from collage_neuron.passes.backends.nki.backend import Nki
from collage_neuron.validation import synthetic


@pytest.mark.parametrize("largest", [2.0**30, 2e19])
def test_the_first_step_on_a_lazy_device_is_not_rejected_for_what_is_outside(
    largest: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Samples of lazy devices have drawn gradients; with one of 2e19 a divisor is beyond 2**42, where it is clamped."""
    monkeypatch.setattr(synthetic, "DEVICES", ("cpu",))
    monkeypatch.setattr(Nki, "largest", largest)
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    search_less(monkeypatch)
    p = torch.nn.Parameter(torch.full((300,), 0.5).bfloat16())
    p.grad = torch.ones_like(p)
    with nki_standin.install("nki", "trn1", INFINITY):
        optimizer = collage_neuron.compile(torch.optim.AdamW([p]), backend="nki", verbose=False)
        with pytest.raises(TranslationError, match="drawn values") if largest > 2**42 else nullcontext():
            optimizer.step()
    custom_op.function.cache_clear()


def compiled(make: Callable[[Any], torch.optim.Optimizer], n: int = 40, **options: Any) -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.zeros(n))
    return collage_neuron.compile(make([p]), verbose=False, **options)


def step(optimizer: torch.optim.Optimizer, gradient: float) -> torch.Tensor:
    """The exact value of the parameter after a step with gradients of this size."""
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.linspace(0.5, 1, p.numel()).mul(gradient).to(p.dtype)
    optimizer.step()
    return collage_neuron.exact_value(optimizer, p)


@pytest.fixture
def nki(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    search_less(monkeypatch)
    calls._warn_of_clamped.cache_clear()
    with nki_standin.install("nki", "trn1", INFINITY):
        yield
    custom_op.function.cache_clear()


class Own(torch.optim.Optimizer):
    """Adam's second moment, and an update that it enters as `rule` says."""

    def __init__(self, params: Any, rule: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.01, "eps": 1e-8})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                v = self.state[p].setdefault("v", torch.zeros_like(p))
                v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.add_(self.rule(p.grad, v, group["eps"]), alpha=-group["lr"])


INSIDE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "centered": partial(torch.optim.RMSprop, centered=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "eps in the root": partial(Own, rule=lambda g, v, eps: g / (v + eps).sqrt()),
    "root of a root": partial(Own, rule=lambda g, v, eps: g / (v.sqrt() + eps).sqrt()),
    "maximum": partial(Own, rule=lambda g, v, eps: g / v.sqrt().clamp(min=eps)),
    "twice": partial(Own, rule=lambda g, v, eps: g / ((v.sqrt() + eps) * 2.0)),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("strategy", ["plus", "split422"])
def test_divisors_with_an_eps_are_not_warned_of(name: str, strategy: str, nki: None) -> None:
    step(compiled(INSIDE[name], backend="nki", strategy=strategy, validate="off"), 1e-3)


OUTSIDE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, eps=1e-15),
    "no eps": partial(torch.optim.AdamW, eps=0.0),
    "eps in the root": partial(Own, rule=lambda g, v, eps: g / (v + eps * 1e-20).sqrt()),
    "square": partial(Own, rule=lambda g, v, eps: g / (g * g)),
    "magnitude": partial(Own, rule=lambda g, v, eps: g / g.abs()),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_divisors_that_may_be_clamped_are_warned_of_once(name: str, nki: None) -> None:
    optimizer = compiled(OUTSIDE[name], backend="nki", validate="off")
    with pytest.warns(collage_neuron.ClampedDivisor, match=r"2\.3e-13.*larger eps, or backend='xla'.*filter"):
        step(optimizer, 1e-3)
    step(optimizer, 1e-3)


def test_an_eps_that_becomes_small_is_warned_of(nki: None) -> None:
    optimizer = compiled(torch.optim.AdamW, backend="nki", validate="off")
    step(optimizer, 1e-3)
    optimizer.param_groups[0]["eps"] = 1e-14
    with pytest.warns(collage_neuron.ClampedDivisor):
        step(optimizer, 1e-3)


@pytest.mark.filterwarnings("ignore::collage_neuron.ClampedDivisor")
@pytest.mark.parametrize(
    ("make", "gradient"),
    [
        (partial(torch.optim.AdamW, eps=1e-15), 1e-14),
        (torch.optim.AdamW, 1e13),
        (partial(Own, rule=lambda g, v, eps: torch.where(v.sqrt() > 0, g, g + 1.0)), 0.0),
    ],
    ids=["eps", "gradient", "root of 0"],
)
def test_the_error_for_what_is_outside_names_the_domain_and_a_remedy(
    make: Callable[[Any], torch.optim.Optimizer], gradient: float, nki: None
) -> None:
    optimizer = compiled(make, backend="nki")
    with pytest.raises(
        TranslationError,
        match=r"drop a number.*aws-neuron-sdk#1296.*2\*\*-42 .*larger eps.*backend='xla'.*only hide it",
    ):
        step(optimizer, gradient)
