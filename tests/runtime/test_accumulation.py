"""What gradients lose that are accumulated over microsteps: the numbers of docs/integrations.md."""

from __future__ import annotations

import pytest
import torch
from torch import nn

Gradients = list[torch.Tensor]


def microsteps(n: int) -> tuple[Gradients, Gradients, Gradients]:
    """Gradients of n microsteps added by autograd in bf16, in fp32 and rounded once, and in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    target = torch.randn(64, 64) / 8
    params = list(model.parameters())
    in_bf16 = [torch.zeros_like(p) for p in params]
    total = [torch.zeros_like(p, dtype=torch.float32) for p in params]
    exact = [torch.zeros_like(p, dtype=torch.float64) for p in params]
    for x in torch.randn(n, 32, 64).bfloat16():
        model.zero_grad()
        ((model(x).float() - x.float() @ target).square().mean() / n).backward()
        for p, *sums in zip(params, in_bf16, total, exact, strict=True):
            assert p.grad is not None
            for s in sums:
                s += p.grad  # as autograd does with `p.grad`, in the dtype of the sum
    return in_bf16, [t.bfloat16() for t in total], exact


def relative(found: Gradients, exact: Gradients) -> float:
    """The norm of the error in all gradients, over that of the gradients."""
    error = sum((f.double() - e).square().sum() for f, e in zip(found, exact, strict=True))
    return float((error / sum(e.square().sum() for e in exact)) ** 0.5)


@pytest.mark.parametrize(("n", "percent"), [(8, 0.33), (64, 0.8), (256, 1.6)])
def test_what_accumulation_in_bf16_loses_and_one_rounding_of_a_sum_in_fp32(n: int, percent: float) -> None:
    in_bf16, by_hand, exact = microsteps(n)
    assert 100 * relative(in_bf16, exact) == pytest.approx(percent, rel=0.25)
    assert 100 * relative(by_hand, exact) == pytest.approx(0.17, rel=0.25)


def test_autograd_adds_gradients_in_bf16() -> None:
    """1 + 2**-9 is 1 in bf16: the sums above are what `p.grad` holds."""
    p = nn.Parameter(torch.ones(1).bfloat16())
    for worth in (1.0, 2**-9, 2**-9):
        (p * worth).sum().backward()
    assert p.grad is not None
    assert p.grad.item() == 1.0
