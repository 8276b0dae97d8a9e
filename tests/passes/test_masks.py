"""Masks that are made of masks, or known to the host, choose what torch's masks choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from as_written import Written
from running import compiled_only

import collage_neuron

Rule = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

RULES: dict[str, Rule] = {
    "isfinite": lambda g, m, lr: torch.where(torch.isfinite(g), m, torch.zeros_like(g)),
    "product": lambda g, m, lr: torch.where((g > 0) * (m > 0), m, g + 1.0),
    "sum": lambda g, m, lr: ((g > 0) + (m > 0)) * m,
    "mask chosen by a mask": lambda g, m, lr: torch.where(torch.where(g > 0, m > 0, g < -0.1), m, g),
    "numbers as truth": lambda g, m, lr: torch.where(torch.logical_and(g, m), m, g + 1.0),
    "known to the host": lambda g, m, lr: torch.where(torch.tensor(lr > 0.05), m, g),
    "known, and a number": lambda g, m, lr: torch.where(torch.tensor(lr > 0.05), 0.5, g),
}


class Chosen(Written):
    """A momentum, and a step that `rule` makes of it and of the gradient."""

    def __init__(self, params: Iterator[torch.nn.Parameter] | list[torch.nn.Parameter], rule: Rule) -> None:
        super().__init__(params, lr=0.1)
        self.rule = rule

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g, alpha=0.1)
        p.add_(self.rule(g, m, group["lr"]), alpha=-group["lr"])


def trained(rule: Rule, **options: Any) -> torch.Tensor:
    """The parameter after four steps, of which the last two have another learning rate."""
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(300))
    optimizer: Any = Chosen([p], rule)
    if options:
        optimizer = collage_neuron.compile(optimizer, verbose=False, **options)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 2 else 0.01
        p.grad = torch.randn(300, generator=g).bfloat16().to(p.dtype)
        p.grad[:20] = 0.0
        optimizer.step()
    return collage_neuron.exact_value(optimizer, p) if options else p.detach()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_masks_choose_what_they_choose_in_fp32(name: str, backend: str) -> None:
    with nullcontext() if name.startswith("known") else compiled_only():
        found = trained(RULES[name], strategy="fp32", backend=backend)
    assert (found - trained(RULES[name])).abs().max() <= 2**-22


@compiled_only()
def test_what_is_not_finite_is_left_out() -> None:
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer: Any = collage_neuron.compile(Chosen([p], RULES["isfinite"]), strategy="fp32")
    p.grad = torch.tensor([1.0, torch.inf, torch.nan]).bfloat16().to(p.dtype)
    optimizer.step()
    assert p[0] != 0
    assert torch.equal(p[1:].detach().float(), torch.zeros(2))


STORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"comparison": lambda g: g > 0, "isnan": torch.isnan}


class Stored(Chosen):
    """Keeps a mask as numbers, and makes weights of one."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(m, alpha=group["lr"])
                m.copy_(self.rule(p.grad, m, group["lr"]))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("strategy", ["fp32", "plus", "split433"])
@compiled_only()
def test_a_mask_is_stored_as_numbers(name: str, strategy: str) -> None:
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer: Any = Stored([p], lambda g, m, lr: STORED[name](g))
    optimizer = collage_neuron.compile(optimizer, verbose=False, strategy=strategy)
    p.grad = torch.linspace(-2, 2, 40).bfloat16()
    p.grad[3] = torch.nan
    optimizer.step()
    assert torch.equal(optimizer.state[p]["m"].float(), STORED[name](p.grad).float())
